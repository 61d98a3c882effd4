"""Other tools: `torch.export`, and trainers of libraries, of which each module imports its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from ..optim import MPOptimizer

# The options of `mpcompile()` that `MPOptimizer` has, too.
_SHARED = ("emit", "mode", "options", "verify", "dump")


def compiled_optimizer(optimizer: Optimizer, options: Mapping[str, Any]) -> MPOptimizer:
    """The optimizer of a trainer whose model is compiled with these options; an `MPOptimizer` is
    taken as it is.
    """
    if isinstance(optimizer, MPOptimizer):
        return optimizer
    return MPOptimizer(optimizer, **{k: v for k, v in options.items() if k in _SHARED})
