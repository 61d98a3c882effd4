"""Steps that were skipped one after the other: of four it is said. With repair=True, first the next
forward is noted, and what overflows in it pinned to FP32 (`compiler/repair.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from .live_scale import LiveScale, Stepped
from .messages import Messages
from .scale_search import after_backward

SKIPS = 4  # in a row
MOST_CALLS = 64  # noted at a time, with their inputs: a loop may call the model without any step


class SkippedInARow:
    """The steps of one loss scale that were skipped in a row.

    Attributes:
        pending: whether the next training forward is to be noted, or this one is.
        skipped: how many steps were skipped since the last good one, as far as is known.
        before: the scale at the last good step.
        calls: what the forwards noted so far have recorded.
        repair: pins what overflows in these; returns whether it has. None: nobody asked for it.
    """

    def __init__(self, live: LiveScale, said: Messages) -> None:
        self._live, self._said = live, said
        self.pending = False
        self.skipped, self.before = 0, live.scale
        self.calls: deque[Any] = deque(maxlen=MOST_CALLS)
        self.repair: Callable[[], bool] | None = None

    def stepped(self, known: Stepped | None) -> None:
        """An optimizer's step was taken, or skipped for an overflow. Several steps of one forward
        count once.

        Args:
            known: what has become known of such steps.
        """
        if known is not None and known.forwards and known.skipped < known.steps:
            self.skipped = 0
        elif known is not None and known.skipped:
            self.before = self.before if self.skipped else known.before
            self.skipped += known.forwards or not self.skipped
        if self.calls:
            # Not within a backward: that of the noted calls must have ended.
            after_backward(self._conclude)
        elif self.skipped >= SKIPS:
            self.pending = self.repair is not None
            if not self.pending:
                self._said.in_a_row(self.skipped, self._live.scale)

    def _conclude(self) -> None:
        trouble = self.skipped >= SKIPS and bool(self.calls)
        if trouble and self.repair is not None and not self.repair():
            self._said.in_a_row(self.skipped, self._live.scale)
        self.pending, self.skipped = False, 0
        self.calls.clear()
