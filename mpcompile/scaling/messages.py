"""What a loss scale says to users, once each."""

from __future__ import annotations

import logging
import warnings

from .. import logs
from ..errors import MPCompileWarning
from .not_finite import Seen, outside
from .scale_search import after_backward


class Said:
    """What was said of one loss scale.

    A skipped step is spoken of when one has been taken after it: only then was it the scale. Where
    the loss itself is not finite, no step is taken, and that is what is said.

    Attributes:
        floor, skips, row: whether it has spoken of the lowest scale, of skipped steps, and of many
            in a row.
        start: whether it has spoken of a start that no search will find.
    """

    def __init__(self) -> None:
        self.floor = self.skips = self.row = self.start = False
        self._skipped = 0  # steps since one was taken
        self._calls: list[tuple[int, Seen]] = []
        self._others = False  # whether it has spoken of what is not the scale's, since then

    def step(self, skipped: bool) -> None:
        """A step was skipped, or taken: then log one line for the first ones that were skipped."""
        if skipped:
            self._skipped += 1
            return
        if self._skipped and not (self.skips or self._others):
            self.skips = True
            logs.event(
                "scale", logging.WARNING, "first_skips",
                "optimizer steps skipped, because gradients overflowed: %(steps)d. That is how a "
                "loss scale is found and kept; loss_scale_of(model).skipped_steps counts them",
                steps=self._skipped,
            )  # fmt: skip
        self._skipped, self._others = 0, False

    def unsearched(self, start: float) -> None:
        """Log that graphs begin at this scale, since none of their backward passes can search."""
        if not self.start:
            self.start = True
            logs.event(
                "scale", logging.INFO, "unsearched",
                "the loss scale starts at %(start)g, and steps are skipped until it fits: CUDA "
                "graphs can't be run again to search for it. A training step that is compiled as a "
                "whole finds it; LossScale.dynamic(init_scale) gives another start",
                start=start,
            )  # fmt: skip

    def hopeless(self, number: int, call: Seen) -> None:
        """The gradients of a call are finite at no scale: say why, once its backward has ended. The
        number grows from one forward to the next.
        """
        self._calls.append((number, call))
        if len(self._calls) == 1:
            after_backward(self._say_why)

    def _say_why(self) -> None:
        calls = [call for _, call in sorted(self._calls, key=lambda one: one[0])]
        self._calls.clear()
        self.not_finite(
            outside(calls)
            or "the model's results are not, at finite inputs; "
            "mpcompile.diagnose(model, inputs, loss_fn=...) names the operator"
        )

    def not_finite(self, what: str) -> None:
        """Log what is not finite where no scale helps; once until a step is taken."""
        if not self._others:
            self._others = True
            text = "gradients are not finite at any loss scale: %(what)s"
            logs.event("scale", logging.WARNING, "not_finite", text, what=what)

    def in_a_row(self, steps: int, scale: float) -> None:
        """Warn of steps that were skipped one after the other, unless of the lowest scale."""
        if not (self.row or self.floor):
            self.row = True
            warnings.warn(
                f"{steps} optimizer steps in a row were skipped, because gradients were not "
                f"finite. The loss scale is {scale:g}, and may still come down to where they fit. "
                "If it goes on, mpcompile.diagnose(model, inputs, loss_fn=...) on such a batch "
                "names what overflows, and what to keep in FP32.",
                MPCompileWarning,
                stacklevel=2,
            )

    def at_floor(self, lowest: float) -> None:
        """Warn that the scale can't get lower, where nothing more is known."""
        if not self.floor:
            self.floor = True
            warnings.warn(
                f"the loss scale is at its floor ({lowest:g}) and gradients still "
                "overflow: the model itself makes inf or nan. mpcompile.diagnose(model, inputs, "
                "loss_fn=...) names where; try dtype=torch.bfloat16, or Policy(modules={...: "
                "'fp32'}) for the part that overflows.",
                MPCompileWarning,
                stacklevel=2,
            )
