"""Say, once for a model, which of its products run outside of its compiled graphs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..devices.registry import is_supported
from ..errors import MPCompileError, MPCompileWarning
from ..inspect.graph_plan import GraphPlan
from ..inspect.plan import ENOUGH
from ..inspect.plan_text import shortened
from ..planner.target import target_of
from .outside import Outside

__all__ = ["say_outside"]


def say_outside(
    plans: Sequence[GraphPlan],
    module: nn.Module,
    outside: Outside,
    *,
    dtype: torch.dtype | None,
    strict: bool,
) -> bool:
    """Warn of products in FP32 that no graph holds, or raise if that is to be an error. Returns
    whether it was said. It isn't where the device gains nothing by the low dtype.

    Args:
        plans: of the graphs compiled so far.
        module: the compiled module.
        outside: what one of its calls ran outside of them.
        dtype: what the user asked for; None: "auto".
        strict: whether it is an error.
    """
    if outside.device is None or outside.share >= ENOUGH:
        return False
    if not plans and any(True for _ in module.parameters()):
        return False  # there is another warning of that
    if any(isinstance(m, DistributedDataParallel) for m in module.modules()):
        return False  # Dynamo splits the graph of a DDP inside: what ran in it isn't counted
    if not is_supported(outside.device) or not target_of(outside.device, dtype).promised:
        return False
    names = shortened([path or type(module).__name__ for path, _ in outside.modules.most_common()])
    text = (
        f"mpcompile: {outside.share:.0%} of the product FLOPs of {type(module).__name__} ran in "
        f"compiled graphs; {names} ran as torch runs them, in FP32, because Dynamo left the code "
        f"that calls them to Python: {outside.why}. Move what breaks the graph out of there, or "
        "compile these modules each by itself, with mpcompile(module)"
    )
    if strict:
        raise MPCompileError(text)
    warnings.warn(text, MPCompileWarning, stacklevel=5)
    return True
