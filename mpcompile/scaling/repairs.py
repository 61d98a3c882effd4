"""What `repair=True` has pinned to FP32 in the graphs of one loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ir.places import Place

MOST = 8


@dataclass
class Repairs:
    """The operators that are pinned, and the events that led to it.

    Attributes:
        events: one sentence for each repair, in order.
        pins: the operators -> the reason; replaced by each repair.
    """

    events: list[str] = field(default_factory=list)
    pins: Mapping[Place, str] = field(default_factory=dict)

    @property
    def used_up(self) -> bool:
        return len(self.events) >= MOST

    def add(self, event: str, pins: Mapping[Place, str]) -> None:
        """Pin operators, each with its reason; takes effect where a graph is compiled."""
        self.events.append(event)
        self.pins = {**self.pins, **pins, **self.pins}
