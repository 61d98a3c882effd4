"""What `repair=True` has pinned to FP32 in the graphs of one loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..ir.places import Place

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

    @property
    def pins(self) -> Mapping[Place, str]:
        """The operators that are pinned -> the reason, as it stands now."""
        return dict(self._pins)

    def lacks(self, pins: Iterable[Place]) -> bool:
        """Whether some of these operators are not pinned yet."""
        return not self._pins.keys() >= set(pins)

    def add(self, event: str, pins: Iterable[tuple[Place, str]]) -> None:
        """Pin operators, each with its reason; takes effect where a graph is compiled."""
        self.events.append(event)
        for place, reason in pins:
            self._pins.setdefault(place, reason)
