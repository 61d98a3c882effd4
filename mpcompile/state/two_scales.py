"""Gradients of one backward at two loss scales: one that is not taken out shows as a factor.

A gradient that leaves a graph does not depend on the scale at which it was made. This is asked of
numbers, once for each graph, while the start of the scale is searched (`fit_scale.py`): it shares
nothing with the proof (`ir/units.py`), which asks the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..errors import MPCompileError

# How far the two scales lie apart. A gradient of FP16's smallest numbers may double at a lower
# scale, by rounding; not grow by this.
FACTOR = 16.0

_NEAR = 0.01  # relative, of norms: rounding makes no more of a factor


def check_two_scales(
    higher: Sequence[torch.Tensor | None],
    lower: Sequence[torch.Tensor | None],
    scaled: Collection[int],
) -> None:
    """Raise MPCompileError if a gradient follows the loss scale, or its inverse. Waits for the
    device.

    Args:
        higher, lower: the gradients of a graph's inputs at two scales, the first of which is FACTOR
            times the second.
        scaled: the inputs (by number) whose gradient is to leave multiplied by the scale.
    """
    for i, (one, other) in enumerate(zip(higher, lower, strict=True)):
        if one is None or other is None or one.is_sparse:
            continue
        wanted = FACTOR if i in scaled else 1.0
        one, other = one.float() / wanted, other.float()
        if _is_multiple(one, other, FACTOR) or _is_multiple(other, one, FACTOR):
            raise MPCompileError(
                f"the gradient of input {i} of a compiled graph depends on the loss scale. This is "
                "a bug of mpcompile, and the gradient is wrong; until it is mended, compile this "
                'model with loss_scale="none", or in BF16'
            )


def _is_multiple(one: torch.Tensor, other: torch.Tensor, factor: float) -> bool:
    """Whether `one` is `factor` times `other`, and neither is zero, inf or NaN."""
    size = torch.linalg.vector_norm(one)
    off = torch.linalg.vector_norm(one - factor * other)
    near, known = torch.stack([off <= _NEAR * size, (size > 0) & size.isfinite()]).tolist()
    return bool(near and known)
