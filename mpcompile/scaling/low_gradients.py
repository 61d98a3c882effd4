"""The dtype in which the gradient of a parameter that has a working copy is stored.

What reaches a parameter is its gradient: the loss scale is divided out before. It is FP32, but for
one case: without a loss scale, as in BF16, it stays in the copy's dtype as long as only the
parameter's MPOptimizer reads it, and half of the gradients' memory is saved. Whatever else a loop
stores there may be FP32 (`grad_dtype` is None, which takes any): a penalty on the weights, a part
of the model that runs uncompiled, a gradient that is set by hand. `p.grad.dtype` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_inside.names import copy_all, multiply_all, will_run


def expect(master: torch.Tensor, *, low: bool) -> None:
    """Before a forward: let the gradient be stored in a low dtype, or in FP32 alone."""
    if low:
        if master.grad_dtype is not None:
            master.grad_dtype = None
        return
    if master.grad_dtype is torch.float32:
        return
    grad = master.grad
    master.grad = None
    master.grad_dtype = torch.float32
    master.grad = None if grad is None else grad.float()


def stores(node: Any) -> bool:
    """Whether the running backward will store a gradient in this AccumulateGrad's parameter, or, as
    `torch.autograd.grad` does, return it.
    """
    try:
        return bool(will_run(node))
    except RuntimeError:  # raised for a leaf whose gradient is returned
        return False


def unscaled(gradients: Sequence[torch.Tensor], scale: torch.Tensor | None) -> list[torch.Tensor]:
    """Low gradients in FP32, divided by the loss scale (0-d) if there is one. Overflows stay."""
    if not gradients:
        return []
    wide = [torch.empty_like(g, dtype=torch.float32) for g in gradients]
    copy_all(wide, list(gradients))
    if scale is not None:
        multiply_all(wide, scale.reciprocal())
    return wide
