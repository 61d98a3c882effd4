"""Say, once for a model, which of its products run outside of its compiled graphs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..devices.registry import is_supported
from ..errors import MPCompileError, MPCompileWarning
from ..planner.target import target_of
from ..plans.graph_plan import GraphPlan
from ..plans.plan import ENOUGH
from ..plans.plan_text import shortened
from .outside import Outside

__all__ = ["gains", "say_outside"]


def gains(outside: Outside, module: nn.Module | None, dtype: torch.dtype | None) -> bool:
    """Whether what a call ran outside of the graphs would gain anything in one.

    Args:
        outside: what it ran there.
        module: the compiled module; None: it is a function.
        dtype: what the user asked for; None: "auto".
    """
    if outside.device is None or outside.share >= ENOUGH:
        return False
    inside = module.modules() if module is not None else ()
    if any(isinstance(m, DistributedDataParallel) for m in inside):
        return False  # Dynamo splits the graph of a DDP inside: what ran in it isn't counted
    return is_supported(outside.device) and target_of(outside.device, dtype).promised


def say_outside(
    plans: Sequence[GraphPlan], compiled: nn.Module | str, outside: Outside, *, strict: bool
) -> bool:
    """Warn of products in FP32 that no graph holds, or raise if that is to be an error. Returns
    whether it was said.

    Args:
        plans: of the graphs compiled so far.
        compiled: the module, or the name of the function.
        outside: what one of its calls ran outside of them.
        strict: whether it is an error.
    """
    of = compiled if isinstance(compiled, str) else type(compiled).__name__
    if not plans and not isinstance(compiled, str) and any(True for _ in compiled.parameters()):
        return False  # there is another warning of that
    names = shortened([path or of for path, _ in outside.modules.most_common()])
    text = (
        f"mpcompile: {outside.share:.0%} of the product FLOPs of {of} ran in compiled graphs; "
        f"{names} ran as torch runs them, in FP32, because Dynamo left the code that calls them to "
        f"Python: {outside.why}. Move what breaks the graph out of there"
    )
    if strict:
        raise MPCompileError(text)
    warnings.warn(text, MPCompileWarning, stacklevel=5)
    return True
