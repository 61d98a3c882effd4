"""On what ranks agree, once: the start of each loss scale.

What one rank knows doesn't decide whether it takes part: its graph may have been left in FP32, and
that of another rank not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import MPCompileError
from ..ranks.agree import Ranks
from . import parameters
from .loss_scale import LossScale


def only_scale_of(parameter: torch.Tensor) -> LossScale | None:
    """The scale of the graphs that read a parameter, if they have one and the same."""
    scales = parameters.scales_of(parameter)
    return scales[0] if len(scales) == 1 else None


def agree(held: Sequence[torch.Tensor], ranks: Ranks) -> list[bool]:
    """Take the least start that a rank has of each loss scale.

    Args:
        held: parameters, the same on all ranks.

    Returns:
        For each parameter, whether some rank knows the start of its scale, or none searches.

    Raises:
        MPCompileError: a parameter's gradients are scaled on some ranks only.
    """
    scales = [only_scale_of(p) for p in held]
    starts = [math.inf if s is None else s.start for s in scales]
    known = [s is None or not s.fitting or s.search.found for s in scales]
    scaled = [bool(parameters.scales_of(p)) for p in held]
    columns: list[Sequence[float]] = [starts, known, scaled, [not x for x in scaled]]
    numbers = ranks.least([x for column in columns for x in column])
    n = len(held)
    starts, all_know, everywhere, nowhere = (numbers[i * n : (i + 1) * n] for i in range(4))
    for p, all_scaled, none_scaled in zip(held, everywhere, nowhere, strict=True):
        if not (all_scaled or none_scaled):
            _refuse(p)
    for scale in {s for s in scales if s is not None}:
        scale.take_start(min(x for x, s in zip(starts, scales, strict=True) if s is scale))
    return [x < math.inf or bool(y) for x, y in zip(starts, all_know, strict=True)]


def _refuse(parameter: torch.Tensor) -> None:
    raise MPCompileError(
        f"a parameter of shape {tuple(parameter.shape)} gets scaled gradients on some of the ranks "
        "only, so they would not skip the same steps. Either a graph was left in FP32 there (a "
        "warning gives the reason), or some ranks have not run it yet: all must run the compiled "
        'model before the first step. Otherwise use loss_scale="none" or dtype=torch.bfloat16'
    )
