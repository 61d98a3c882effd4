"""Steps that were skipped one after the other: when to look for what overflows.

    4 steps in a row skipped    the next step is *watched*: each graph of this scale runs node by
                                node, and records its numbers (runtime/watched_call.py)
    its optimizer step          *concludes*: what was recorded is judged (runtime/warn_or_repair.py)
    nothing to be done yet      the next look comes when twice as many steps were skipped

Nothing is kept of a step that is not watched. What a generated step on a device has come to is
learnt later, and counted for eight forwards at a time.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Any

from ..torch_inside.autograd import running_backward
from ..torch_inside.health import why_off
from ..torch_inside.private_names import Part
from .live_scale import LiveScale, Stepped
from .scale_search import after_backward

FIRST_LOOK = 4  # skipped steps in a row
EVERY = 8  # forwards whose generated steps are counted at a time
MOST_LOOKS = 64  # kept at a time, with their inputs: a loop may call the model without any step
# A dynamic scale that has come down by this factor without a good step was not just too large.
FALL = 2.0**-16


class Verdict(enum.Enum):
    WAIT = "nothing was found, or the scale may still come down to where gradients fit"
    REPAIRED = "graphs will be compiled anew"
    TOLD = "the user was told; there is no need to look again"


class Trouble:
    """The steps of one loss scale that were skipped in a row, and the looks at them.

    Args:
        live: the scale's current values.

    Attributes:
        pending: whether the next training forward is to be watched, or this one is. The only thing
            that a forward asks while all is well.
        skipped: how many steps were skipped since the last good one, as far as is known.
        before: the scale at the last good step, or None: not known.
        fed: whether something that was not finite came into the graphs that were looked at last.
        at_floor: whether the warning about the lowest scale waits for the look.
        looks: what the forwards watched so far have recorded.
        judge: judges the looks; None while no graph can be watched.
    """

    def __init__(self, live: LiveScale) -> None:
        self._live = live
        self.pending = self.at_floor = self.fed = False
        self.skipped = 0
        self.before: float | None = None
        self.looks: deque[Any] = deque(maxlen=MOST_LOOKS)
        self.judge: Callable[[], Verdict] | None = None
        self._next = FIRST_LOOK
        self._told = self._gave_up = False  # no more looks
        self._watching = False  # whether the forwards of this step are watched
        self._over = False  # whether their step has come
        self._count = 0  # skipped steps when the watching began
        self._forward = -1  # the forward whose step was counted last
        # Generated steps that are not counted yet: of how many forwards, how many were taken.
        self._forwards = self._taken = 0
        self._start: float | None = None
        self._replaced = live.replaced

    # -- steps ------------------------------------------------------------------------------------

    def skipping(self) -> None:
        """A step is about to be skipped, and to lower the scale."""
        if not self.skipped:
            self.before = self._live.scale

    def settled(self, *, overflow: bool) -> None:
        """An optimizer's step was taken, or skipped for an overflow. Several steps of one forward
        count once.
        """
        counted, self._forward = self._forward == self._live.forwards, self._live.forwards
        if overflow and not (counted and self.skipped):
            self.skipped += 1
        elif not overflow and not counted:
            self.skipped, self._next = 0, FIRST_LOOK
        self._after_step()

    def stepped(self, known: Stepped | None) -> None:
        """A generated step has run. Several steps of one forward count once.

        Args:
            known: what has become known of such steps.
        """
        if self.judge is None:
            return
        if self._replaced != self._live.replaced:
            self._forwards, self._taken, self._replaced = 0, 0, self._live.replaced
        if known is not None:
            if self._forwards == 0:
                self._start = known.before
            self._forwards += known.forwards
            self._taken += known.steps - known.skipped
            if self._forwards >= EVERY:
                if self._taken > 0:
                    self.skipped, self._next, self.before = 0, FIRST_LOOK, self._start
                else:
                    self.skipped += self._forwards
                    self.before = self._start if self.before is None else self.before
                self._forwards = self._taken = 0
        self._after_step()

    def _after_step(self) -> None:
        if self.pending and self.looks and not self._over:
            self._over = True
            # Not within a backward: a checkpoint must compute again what its forward computed.
            after_backward(self._conclude)
        elif not self.pending and self.skipped >= self._next and self._may_look():
            self.pending = True

    def _may_look(self) -> bool:
        if self.judge is None or self._told or self._gave_up:
            return False
        return why_off(Part.WATCH) is None

    # -- looks ------------------------------------------------------------------------------------

    def is_watched(self) -> bool:
        """Whether the forward that is about to run is to be watched, if one is pending. Within a
        backward a checkpoint does as in its first forward: it compares what is saved.
        """
        if running_backward() == -1:
            if not self._watching:
                self._count = self._live.state.skipped_steps
            self._watching, self._over = True, False
        return self._watching

    def _conclude(self) -> None:
        assert self.judge is not None
        self.pending = self._watching = self._over = False
        if self._live.state.skipped_steps == self._count:
            self.skipped, self._next = 0, FIRST_LOOK
        elif self.looks:
            verdict = self.judge()
            self._told |= verdict is Verdict.TOLD
            if verdict is Verdict.REPAIRED:
                self.skipped, self._next = 0, FIRST_LOOK
            else:
                self._next = 2 * max(self.skipped, FIRST_LOOK)
        self.at_floor = False
        self.looks.clear()

    def give_up(self) -> None:
        """A graph can't be watched: don't look again."""
        self._gave_up = True
        self.pending = self._watching = self._over = False
        self.looks.clear()

    def look_at_floor(self) -> bool:
        """An overflow has come at the lowest scale. Returns whether a look will say, or has said,
        what it is.
        """
        if self._may_look():
            self.pending = self.at_floor = True
        return self.at_floor or self._told

    def may_still_fall(self) -> bool:
        """Whether the scale, on its way down, may still reach where gradients fit."""
        scale, rule = self._live.scale, self._live.rule
        fallen = self.before is not None and scale <= self.before * FALL
        return rule.dynamic and scale > rule.min_scale and not fallen
