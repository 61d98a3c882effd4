"""State of the search for a loss scale's start; `fit_scale.py` does the searching."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.weak import WeakIdKeyDictionary

_MOST_FAILURES = 3


class Search:
    """The search for the start of one loss scale, in the first backward.

    Attributes:
        fitting: whether the start is still to be found.
        possible: whether some graph can be run again, so that its first backward can search.
    """

    def __init__(self, *, fitting: bool) -> None:
        self.fitting = fitting
        self.possible = False
        self._failures = 0
        self._found_in: int | None = None  # number of the backward that found the start
        self._in_vain = WeakIdKeyDictionary()  # the scale tensors of failed searches' forwards

    @property
    def found(self) -> bool:
        """Whether a backward of this iteration has found the start. The next step or forward ends
        the search; until then other graphs of this backward may still lower it.
        """
        return self._found_in is not None

    @property
    def goes_on(self) -> bool:
        """Whether a later backward may still find the start."""
        return self.fitting and self.possible and not self.found

    def find(self) -> None:
        """Note that the backward that is running has found the start."""
        self._found_in = backward_running()

    def end_if_found(self, *, but_in: int | None = None) -> None:
        """End the search if the start is found, unless the backward number `but_in` found it."""
        if self._found_in is not None and self._found_in != but_in:
            self.end()

    def end_if_over(self) -> None:
        """At an optimizer's step: end the search if the start is found, or no graph can search."""
        if not self.goes_on:
            self.end()

    def end(self) -> None:
        """The start is known."""
        self.fitting, self._found_in = False, None

    def fail(self, used: torch.Tensor, *, hopeless: bool) -> None:
        """A backward overflowed at every scale. One such batch may be an accident; after a few,
        the search ends, and training starts as GradScaler does.

        Args:
            used: the scale tensor that its forward multiplied by.
            hopeless: some values themselves are not finite, which is no failure of the search.
        """
        self._in_vain[used] = True
        self._failures += not hopeless
        if self._failures >= _MOST_FAILURES:
            self.fitting = False

    def was_in_vain(self, used: torch.Tensor) -> bool:
        """Whether a search has failed for a forward that used this tensor."""
        return used in self._in_vain


def backward_running() -> int:
    """The number of the backward that runs in this thread, or -1 if none does.

    Read as torch.utils.checkpoint reads it (torch 2.13; the same in 2.11).
    """
    return torch._C._current_graph_task_id()


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` once the backward that runs in this thread has ended; at once if none does.

    Done as DistributedDataParallel does it (torch 2.13; the same in 2.11).
    """
    if backward_running() == -1:
        function()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(function)
