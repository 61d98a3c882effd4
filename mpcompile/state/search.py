"""How far the search for a loss scale's start has come; `fit.py` does the searching."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

_MOST_FAILURES = 3


class Search:
    """The search for the start of one loss scale, in the first backward.

    Attributes:
        fitting: whether the value is still to be found.
        possible: whether some graph can be run again, so that its first backward searches.
    """

    def __init__(self, *, fitting: bool) -> None:
        self.fitting = fitting
        self.possible = False
        self._failures = 0
        self._found_in: int | None = None  # the backward that has found the value, by its number
        self._in_vain = WeakIdKeyDictionary()  # what the forwards of failed ones multiplied by

    @property
    def found(self) -> bool:
        """Whether a backward of this iteration has found the value. The next step or forward ends
        the search; until then other graphs of this backward may still lower it.
        """
        return self._found_in is not None

    def find(self) -> None:
        """The backward that is running has found the value."""
        self._found_in = backward_running()

    def end_if_found(self, *, but_in: int | None = None) -> None:
        """End the search, unless the backward with number `but_in` has found the value."""
        if self._found_in is not None and self._found_in != but_in:
            self.fitting, self._found_in = False, None

    def fail(self, used: torch.Tensor, *, hopeless: bool) -> None:
        """A backward overflowed at every scale. One such batch may be an accident; after a few
        training starts as GradScaler does.

        Args:
            used: what its forward multiplied by.
            hopeless: values that are not finite: that is no failure of the search.
        """
        self._in_vain[used] = True
        self._failures += not hopeless
        if self._failures == _MOST_FAILURES:
            self.fitting = False

    def was_in_vain(self, used: torch.Tensor) -> bool:
        """Whether a search has failed for a forward that used this tensor."""
        return used in self._in_vain


def backward_running() -> int:
    """The number of the backward that runs in this thread, or -1: none.

    As torch.utils.checkpoint asks (read in torch 2.13; the same in 2.11).
    """
    return torch._C._current_graph_task_id()
