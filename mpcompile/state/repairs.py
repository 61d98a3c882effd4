"""What `repair=True` has pinned to FP32 in the graphs of one loss scale."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ..ir.places import Place, places

MOST = 8


class Repairs:
    """The operators that are pinned, and the events that led to it.

    Attributes:
        events: one sentence for each repair, in order.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self._pins: dict[Place, str] = {}

    @property
    def used_up(self) -> bool:
        """Whether no more repairs are made."""
        return len(self.events) >= MOST

    def lacks(self, pins: Iterable[Place]) -> bool:
        """Whether some of these operators are not pinned yet."""
        return not self._pins.keys() >= set(pins)

    def add(self, event: str, pins: Iterable[tuple[Place, str]]) -> None:
        """Pin operators, each with its reason; takes effect where a graph is compiled."""
        self.events.append(event)
        for place, reason in pins:
            self._pins.setdefault(place, reason)

    def in_graph(self, graph: fx.Graph) -> dict[str, str]:
        """The operators of a captured graph that are pinned: name -> reason."""
        if not self._pins:
            return {}
        found = places(graph).items()
        return {name: self._pins[place] for name, place in found if place in self._pins}
