"""What a loss scale says to users, once each.

Where something was not finite before any gradient was, no loss scale helps, and users should look
at their data or their loss. Each graph of a step is looked at, in the order of the forward. The
first that got NaN or made it tells: NaN that it got came with the data; if the results of all
graphs are finite, and the gradient that came back is not, then that is the loss's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import logs
from ..errors import warn
from ..torch_inside.tensors import is_bad, is_float
from .overflows import any_nonfinite
from .scale_search import after_backward


class Messages:
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
            warn(
                f"{steps} optimizer steps in a row were skipped: gradients were not finite. The "
                f"loss scale is {scale:g}, and may still fall until they fit. If it goes on, "
                "mpcompile.diagnose(model, inputs, loss_fn=...) names what overflows, and what to "
                "keep in FP32."
            )

    def at_floor(self, lowest: float) -> None:
        """Warn that the scale can't get lower, where nothing more is known."""
        if not self.floor:
            self.floor = True
            warn(
                f"the loss scale is at its floor ({lowest:g}) and gradients still "
                "overflow: the model itself makes inf or nan. mpcompile.diagnose(model, inputs, "
                "loss_fn=...) names where; try dtype=torch.bfloat16, or Policy(modules={...: "
                "'fp32'}) for the part that overflows."
            )


@dataclass(frozen=True)
class Seen:
    """One call of a graph in a step whose gradients are not finite.

    Attributes:
        inputs: the names of its inputs that hold NaN or infinity.
        parameters: whether all of these are parameters.
        results, received: whether a result of it, or a gradient that it received, is not finite. In
            results minus infinity is, if finite gradients come back: it masks out.
    """

    inputs: tuple[str, ...]
    parameters: bool
    results: bool
    received: bool

    @classmethod
    def of(
        cls, names: Sequence[str], inputs: Sequence[Any], results: Sequence[Any],
        received: Sequence[torch.Tensor],
    ) -> Seen:  # fmt: skip
        """Look at a call, whose first inputs have these names; waits for the device."""
        came, made = bool(any_nonfinite(received)), [x.detach() for x in results if is_float(x)]
        bad = [(n, x) for n, x in zip(names, inputs, strict=False) if is_bad(x)]
        return cls(
            tuple(name for name, _ in bad),
            all(x.is_leaf and x.requires_grad for _, x in bad),
            any(map(is_bad, made)) or (came and bool(any_nonfinite(made))),
            came,
        )

    @property
    def hopeless(self) -> bool:
        """Whether this graph's gradients are finite at no scale."""
        return self.results or self.received


def outside(calls: Sequence[Seen]) -> str | None:
    """What is not finite, if the graphs did not make it, and where to look.

    Args:
        calls: the graphs of one step, in the order of the forward.
    """
    for call in calls:
        if call.inputs:
            what, where = ", ".join(call.inputs), "look at the data"
            if call.parameters:
                where = "look at what wrote to these parameters"
            return f"what the model was called with holds NaN or infinity ({what}): {where}"
        if call.results:
            return None
    if calls and calls[-1].received:
        return (
            "the model's results are finite, and the gradient that comes back from the loss is "
            "not: look at the targets and at the loss"
        )
    return None
