"""On what ranks agree, once: the start of each loss scale, and what may travel in the low dtype.

What one rank knows doesn't decide whether it takes part: its graph may have been left in FP32, and
that of another rank not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import MPCompileError
from ..ranks.agree import Ranks
from . import parameters
from .loss_scale import LossScale


def only_scale_of(parameter: torch.Tensor) -> LossScale | None:
    """The scale of the graphs that read a parameter, if they have one and the same."""
    scales = parameters.scales_of(parameter)
    return scales[0] if len(scales) == 1 else None


class Wishes(dict[int, Any]):
    """How graphs let what belongs to some objects travel, by the ids of these; None: in FP32."""

    def add(self, of: Any, how: Any) -> None:
        """A graph lets it travel so. Where another one, which has a part in it, does not: FP32."""
        if self.setdefault(id(of), how) != how:
            self[id(of)] = None

    def of(self, objects: Iterable[Any]) -> list[bool]:
        """Of each object, whether there is a wish other than FP32."""
        return [self.get(id(x)) is not None for x in objects]

    def common(self, objects: Iterable[Any], granted: Iterable[bool]) -> list[Any]:
        """The wishes that all ranks have granted."""
        pairs = zip(objects, granted, strict=True)
        return [self.get(id(x)) if yes else None for x, yes in pairs]


def agree(
    held: Sequence[torch.Tensor],
    wishes: Sequence[Sequence[bool]],
    ranks: Ranks,
    *,
    in_backward: bool,
) -> tuple[list[list[bool]], list[bool]] | None:
    """Take the least start that a rank has of each loss scale, and learn what all of them wish.

    Args:
        held: parameters, the same on all ranks.
        wishes: lists of one wish for each parameter.
        in_backward: a backward runs, so no scale may change: agree only if there is none that is
            searched for, and each is the same on all ranks.

    Returns:
        Of each list of wishes, which of them all ranks have; and for each parameter, whether some
        rank knows the start of its scale, or none searches. None if nothing was agreed on.

    Raises:
        MPCompileError: a parameter's gradients are scaled on some ranks only.
    """
    scales = [only_scale_of(p) for p in held]
    starts = [math.inf if s is None else s.start for s in scales]
    # Other graphs of the backward that has found a start may still lower it.
    known = [s is None or not s.fitting or (s.search.found and not in_backward) for s in scales]
    scaled = [bool(parameters.scales_of(p)) for p in held]
    columns: list[Sequence[float]] = [starts, [-x for x in starts], known, scaled]
    columns += [[not x for x in scaled], *wishes]
    numbers = ranks.least([x for column in columns for x in column])
    n = len(held)
    starts, most, all_know, everywhere, nowhere, *common = (
        numbers[i * n : (i + 1) * n] for i in range(len(columns))
    )
    if in_backward and not (all(all_know) and starts == [-x for x in most]):
        return None
    for p, all_scaled, none_scaled in zip(held, everywhere, nowhere, strict=True):
        if not (all_scaled or none_scaled):
            _refuse(p)
    for scale in {s for s in scales if s is not None}:
        scale.take_start(min(x for x, s in zip(starts, scales, strict=True) if s is scale))
    found = [x < math.inf or bool(y) for x, y in zip(starts, all_know, strict=True)]
    return [[bool(x) for x in column] for column in common], found


def _refuse(parameter: torch.Tensor) -> None:
    raise MPCompileError(
        f"a parameter of shape {tuple(parameter.shape)} gets scaled gradients on some of the ranks "
        "only, so they would not skip the same steps. Either a graph was left in FP32 there (a "
        "warning gives the reason), or some ranks have not run it yet: all must run the compiled "
        'model before the first step. Otherwise use loss_scale="none" or dtype=torch.bfloat16'
    )
