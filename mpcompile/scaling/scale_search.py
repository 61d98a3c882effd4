"""The search for a loss scale: of its start, and of what fits after an overflow. When backward
passes search, at which scale they begin, and what becomes of what they find. Those who search are
`fit_scale.py`, graph by graph, and `whole_step/call.py`.

    fitting     the start is not known: the first backward finds it
    settling    it is: a backward that overflows runs again at half the scale, until it fits. This
                lasts until CALM of them in a row have fitted. It begins with the start, and anew
                with each skipped step: so no two in a row are skipped for a scale that is too high.
    growing     no backward has overflowed since the start was found, which leaves room: the scale
                is doubled after every CALM backward passes, instead of after 2000 steps

The closure of an optimizer that calls it several times in a step, as LBFGS does, always runs as if
the scale were settling: what it returns is used at once, so there is no step to be skipped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from .. import logs
from ..ir.scale import HEADROOM, INIT_SCALE
from ..torch_inside.autograd import call_after_backward, running_backward
from .live_scale import LiveScale

CALM = 8
_MOST_FAILURES = 3


class Search:
    """The search for one loss scale.

    Attributes:
        fitting, settling: see above.
        possible: whether some graph can be run again, so that its backward can search.
    """

    def __init__(self, live: LiveScale, *, fitting: bool) -> None:
        self._live, self.fitting = live, fitting
        self.settling = self._growing = False
        self.possible = False
        # The scale before a backward that is finite at no scale, which lowers it as any overflow
        # does; until the next one that fits, which goes on from there.
        self._innocent: float | None = None
        self._calm = 0  # backward passes in a row that fitted
        self._failures = 0
        self._found_in: int | None = None  # number of the backward that found the scale
        self._searched = WeakIdKeyDictionary()  # the scale tensors of their forwards

    @property
    def searching(self) -> bool:
        """Whether a backward runs again if it overflows."""
        return self.fitting or self.settling or (self.possible and in_closure())

    @property
    def found(self) -> bool:
        """Whether a backward of this iteration has found the scale. The next step or forward ends
        the iteration; until then other graphs of this backward may still lower it.
        """
        return self._found_in is not None

    @property
    def goes_on(self) -> bool:
        """Whether a later backward may still find the start."""
        return self.fitting and self.possible and not self.found

    def first_tried(self) -> float:
        """The scale that a search begins with; waits for the device."""
        top = min(INIT_SCALE, self._live.rule.max_scale)
        if self.fitting:
            return top * HEADROOM
        known = self._known
        room = known * 2.0 <= top
        self._growing &= room
        if self._calm < CALM or not room or not (self._growing or in_closure()):
            return known
        self._calm = 0
        return known * 2.0

    def keep(self, at: float, used: torch.Tensor | None, *, tried: float) -> float:
        """Set the scale that a search has found, and return it. The next forward uses another
        tensor, which its own search may write to.

        Args:
            at: the largest scale at which the gradients fitted.
            used: the tensor that their forward multiplied by; None: a whole step has been tried.
            tried: the scale at which the search began.
        """
        known, live = self._known, self._live
        if self.fitting:
            value = min(INIT_SCALE, max(at / HEADROOM, live.rule.min_scale))
            value = min(value, known) if self.found else value
            text = "the first backward found the loss scale %(scale)g"
            logs.event("scale", logging.INFO, "found", text, scale=value)
        else:
            value = at if at == tried == known * 2.0 else min(at, known)
        self._innocent = None
        if self.fitting or value != live.scale:
            live.start_at(value, found=self.fitting)
        live.forget_tensors()
        self._found_in = running_backward()
        if used is not None:
            self._searched[used] = True
        if at < tried:
            self._calm, self._growing = 0, False
        return value

    def give_up(self, used: torch.Tensor, *, hopeless: bool) -> None:
        """A backward overflowed at every scale, so its gradients are multiplied by what its forward
        used: the next forward uses another tensor. One such batch may be an accident; after a few,
        the search ends, and training goes on as with GradScaler.

        Args:
            used: the scale tensor that its forward multiplied by.
            hopeless: some values themselves are not finite, which is no failure of the search.
        """
        if hopeless and self._innocent is None:
            self._innocent = self._live.scale
        self._searched[used] = True
        self._failures += not hopeless
        if self._failures >= _MOST_FAILURES:
            self.fitting = self.settling = False
        self._live.forget_tensors()
        text = "the search for a loss scale failed: gradients overflow at every scale"
        logs.event("scale", logging.INFO, "not_found", text, hopeless=hopeless)

    @property
    def _known(self) -> float:
        """The scale, as it was before steps were skipped for which it was not to blame."""
        return max(self._live.scale, self._innocent or 0.0)

    def end_if_found(self, *, but_in: int | None = None) -> None:
        """End the iteration if the scale is found, unless the backward number `but_in` found it."""
        if self._found_in is not None and self._found_in != but_in:
            self.end()

    def end_if_over(self) -> None:
        """At an optimizer's step: the same, also if no graph can search."""
        if not self.goes_on:
            self.end()

    def end(self, *, settle: bool = True) -> None:
        """The start is known, or a backward was one more that fits."""
        if self.fitting:
            self.fitting = False
            self.settling = self._growing = settle and self.possible and _alone()
            self._calm = 0
        elif self.found:
            self._calm += 1
            self.settling &= settle and (self._growing or self._calm < CALM)
        self._found_in = None

    def again(self) -> None:
        """A step was skipped: let the next backward run again if it overflows, too."""
        if self.possible and not self.fitting and self._failures < _MOST_FAILURES and _alone():
            self.settling, self._calm = True, 0
            self._growing &= self._innocent is not None

    def was_searched(self, used: torch.Tensor) -> bool:
        """Whether a backward has searched, or failed to, whose forward used this tensor."""
        return used in self._searched


def _alone() -> bool:
    """Whether no other process trains with this one: each would search by itself."""
    return not (dist.is_available() and dist.is_initialized())


_closure = threading.local()


def in_closure() -> bool:
    """Whether such a closure runs in this thread. (A backward may run in others.)"""
    return getattr(_closure, "called_again", False)


@contextlib.contextmanager
def closure_runs(*, called_again: bool) -> Iterator[None]:
    """The closure of an optimizer's step runs in this thread.

    Args:
        called_again: whether this optimizer calls it several times in a step.
    """
    before = in_closure()
    _closure.called_again = called_again
    try:
        yield
    finally:
        _closure.called_again = before


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward of this thread has ended; at once if none runs."""
    if running_backward() == -1:
        function()
    else:
        call_after_backward(function)
