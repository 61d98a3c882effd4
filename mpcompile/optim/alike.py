"""Whether tensors still are like the ones before, asked of many at once.

A step asks this of every parameter and every gradient, with cold caches: each attribute of each
tensor costs. So torch's own guards are asked first, one call for all of them. They compare more
than is needed here (classes, `requires_grad`, the thread's dispatch keys), so a "no" of theirs only
means that the facts themselves are compared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_inside.tensors import TensorGuards

Fact = Callable[[torch.Tensor], Any]

DTYPE_AND_LAYOUT: Fact = operator.attrgetter("dtype", "layout")
SHAPE: Fact = operator.attrgetter("shape")
STRIDE: Fact = torch.Tensor.stride


class Alike:
    """What is known of some tensors.

    Args:
        tensors: they, as they are now.
        facts: what must not change, of those above: torch's guards know these. Where one differs,
            those behind it are not asked for.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *facts: Fact) -> None:
        self._facts = facts
        self._known = [[*map(fact, tensors)] for fact in facts]
        self._guards = _guards(tensors)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether as many tensors are alike in all facts."""
        if len(tensors) == self._guards[0] and self._guards[1](*tensors):
            return True
        pairs = zip(self._facts, self._known, strict=True)
        if not all([*map(fact, tensors)] == known for fact, known in pairs):
            return False
        self._guards = _guards(tensors)
        return True


def _guards(tensors: Sequence[torch.Tensor]) -> tuple[int, Callable[..., bool]]:
    """(how many, the check of as many): of class, dtype, device, sizes and strides."""
    if not tensors:
        return 0, lambda: True
    guards = TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],  # type: ignore[misc]
        dynamic_dims_strides=[list(t.stride()) for t in tensors],  # type: ignore[misc]
    )
    return len(tensors), guards.check
