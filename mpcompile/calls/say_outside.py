"""Say, once for a model, which of its products run outside of its compiled graphs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from ..errors import MPCompileError, MPCompileWarning
from ..inspect.graph_plan import GraphPlan
from ..planner.target import target_of
from ..rules.policy import Level
from ..settings import Settings
from .outside import Outside

__all__ = ["say_outside", "shortened"]

ENOUGH = 0.99  # share of the FLOPs in graphs from which on there is nothing to say
_MOST = 4  # modules that a message names


def say_outside(
    settings: Settings, plans: Sequence[GraphPlan], module: nn.Module, outside: Outside
) -> bool:
    """Warn of products in FP32 that no graph holds, or raise under `strict=True`. Returns whether
    that was said.

    Nothing is said where the device gains nothing by the low dtype, and where no part of the model
    was compiled, of which there is another warning.
    """
    if outside.share >= ENOUGH or not plans or settings.level is Level.O0:
        return False
    device = next((p.device for p in module.parameters()), None)
    if device is None or not target_of(device, settings.dtype).promised:
        return False
    names = shortened([path or type(module).__name__ for path, _ in outside.modules.most_common()])
    text = (
        f"mpcompile: {outside.share:.0%} of the product FLOPs of {type(module).__name__} ran in "
        f"compiled graphs; {names} ran as torch runs them, in FP32, because Dynamo left the code "
        f"that calls them to Python: {outside.why}. Move what breaks the graph out of there, or "
        "compile these modules each by itself, with mpcompile(module)"
    )
    if settings.strict:
        raise MPCompileError(text)
    warnings.warn(text, MPCompileWarning, stacklevel=5)
    return True


def shortened(names: Sequence[str]) -> str:
    """`"a, b, c, d and 3 more"`."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
