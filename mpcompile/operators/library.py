"""Library operators: the two that carry loss scaling through a graph, and a softmax for O2.

They are registered with torch.library so that they are ordinary OpOverloads: AOTAutograd's cache
accepts those (a Python callable in the graph would bypass it). Each is CompositeImplicitAutograd
over an autograd.Function: AOTAutograd traces into it, and the compiled graph is plain arithmetic.

The result shares its input's memory, but as a `detach()`: autograd forbids in-place writes to a
view that an autograd.Function returns, and a program may well write to our graph's results.

They are differentiable once. In a second differentiation the gradient would enter in the middle,
unscaled, and leave divided by the scale. It is refused, as AOTAutograd does for compiled graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..torch_inside.tensors import sparse_values

_LIBRARY = torch.library.Library("mpcompile", "DEF")
_LIBRARY.define("scale_grad(Tensor(a) x, Tensor scale) -> Tensor(a)")
_LIBRARY.define("unscale_grad(Tensor(a) x, Tensor scale, Tensor found) -> Tensor(a)")


class ScaleGrad(torch.autograd.Function):
    """Identity; its backward multiplies the gradient by the scale."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        ctx.set_materialize_grads(False)  # a missing gradient stays None, as in FP32
        return x.detach()

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        (scale,) = ctx.saved_tensors
        return None if grads[0] is None else grads[0] * scale, None


class UnscaleGrad(torch.autograd.Function):
    """Identity; its backward divides the gradient by the scale and flags an overflow."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, found: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(scale)
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable
    def backward(
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        (scale,) = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None, None, None
        values = sparse_values(grad) if grad.is_sparse else grad  # nn.Embedding(sparse=True)
        overflow = values.isfinite().logical_not().any().to(torch.float32)
        # Scales are powers of two by default, so the product with the inverse is exact.
        return grad * scale.reciprocal(), None, overflow


def _scale_grad(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return ScaleGrad.apply(x, scale)  # type: ignore[no-untyped-call,no-any-return]


def _unscale_grad(x: torch.Tensor, scale: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return UnscaleGrad.apply(x, scale, found)  # type: ignore[no-untyped-call,no-any-return]


_LIBRARY.define("softmax_low(Tensor x, int dim, ScalarType dtype, bool safe) -> Tensor")


class _SoftmaxLow(torch.autograd.Function):
    """softmax(x) computed in x's dtype and rounded to `dtype`; the backward reads that result.

    dx = p * (g - sum(p * g)),  p the rounded result, in x's dtype
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, dtype: torch.dtype, safe: bool
    ) -> torch.Tensor:
        ctx.dim, ctx.dtype = dim, x.dtype
        softmax = torch.ops.aten._safe_softmax if safe else torch.softmax
        result: torch.Tensor = softmax(x, dim).to(dtype)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        p, grad = result.to(ctx.dtype), grads[0].to(ctx.dtype)
        return p * (grad - (p * grad).sum(ctx.dim, keepdim=True)), None, None, None


def _softmax_low(x: torch.Tensor, dim: int, dtype: torch.dtype, safe: bool) -> torch.Tensor:
    return _SoftmaxLow.apply(x, dim, dtype, safe)  # type: ignore[no-untyped-call,no-any-return]


_LIBRARY.impl("softmax_low", _softmax_low, "CompositeImplicitAutograd")
_LIBRARY.impl("scale_grad", _scale_grad, "CompositeImplicitAutograd")
_LIBRARY.impl("unscale_grad", _unscale_grad, "CompositeImplicitAutograd")
