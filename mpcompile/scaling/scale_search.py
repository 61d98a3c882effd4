"""The search for the start of a loss scale: when backward passes search, and what becomes of what
they find. `fit_scale.py` searches, graph by graph.

The first backward with a finite gradient that is not zero finds the start. After that, or after a
few backwards that overflow at every scale, the scale moves by its rule alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from .. import logs
from ..ir.scale import HEADROOM, INIT_SCALE
from ..torch_inside.names import running_backward
from ..torch_inside.tensors import call_after_backward
from .live_scale import LiveScale

# A bad batch or two come first at times. A model that overflows at every scale would search, which
# runs a backward some thirty times, in each step for ever.
_TRIES = 4


class Search:
    """The search for one loss scale.

    Attributes:
        fitting: whether the start is still to be found: a backward that overflows runs again.
        possible: whether some graph can be run again, so that its backward can search.
    """

    def __init__(self, live: LiveScale, *, fitting: bool) -> None:
        self._live, self.fitting = live, fitting
        self.possible = False
        self._found_in: int | None = None  # number of the backward that found the scale
        self._failures = 0

    @property
    def found(self) -> bool:
        """Whether a backward of this iteration has found the scale. The next step or forward ends
        the iteration; until then other graphs of this backward may still lower it.
        """
        return self._found_in is not None

    @property
    def goes_on(self) -> bool:
        """Whether a later backward may still find the start."""
        return self.fitting and self.possible and not self.found and self._failures < _TRIES

    @property
    def top(self) -> float:
        """The scale that a backward tries first."""
        if not self.fitting:
            return self._live.scale
        start = self._live.scale if self.found else min(INIT_SCALE, self._live.rule.max_scale)
        return start * HEADROOM

    def keep(self, at: float) -> None:
        """Take over what a backward has found: the largest scale at which its gradients fitted."""
        if not self.fitting:
            return
        value = min(INIT_SCALE, max(at / HEADROOM, self._live.rule.min_scale))
        value = min(value, self._live.scale) if self.found else value
        if not (self.found and value == self._live.scale):
            text = "the first backward found the loss scale %(scale)g"
            logs.event("scale", logging.INFO, "found", text, scale=value)
        self._live.start_at(value)
        self._found_in = running_backward()

    def give_up(self) -> None:
        """A backward overflowed at every scale."""
        self._failures += 1
        text = "the search for a loss scale failed: gradients overflow at every scale"
        logs.event("scale", logging.INFO, "not_found", text)

    def end_if_found(self, *, but_in: int | None = None) -> None:
        """End the iteration if the scale is found, unless the backward number `but_in` found it."""
        if self.found and self._found_in != but_in:
            self.end()

    def end(self) -> None:
        """The start is known."""
        self.fitting, self._found_in = False, None


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward of this thread has ended; at once if none runs."""
    if running_backward() == -1:
        function()
    else:
        call_after_backward(function)
