"""Small operators: they carry loss scaling through a graph, mark a place or a value in it, stand
for a cast, or handle many tensors at once; and a softmax for O2, and a loss.

They are registered with torch.library so that they are ordinary OpOverloads: AOTAutograd's cache
accepts those (a Python callable in the graph would bypass it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..torch_inside.names import copy_all
from ..torch_inside.tensors import sparse_values

_LIBRARY = torch.library.Library("mpcompile", "DEF")


def _define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, fixed_layout: bool = False
) -> None:
    """Register an operator without autograd.

    Args:
        fixed_layout: tell Inductor that operands must lie as the graph says. It may copy one in
            order to lay it out, and writes the copy back only where it knows of that.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,) if fixed_layout else ())
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mpcompile::{name}", fake, lib=_LIBRARY)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Of an autograd.Function: none that Dynamo traces, or that is differentiated in turn."""
    return torch.compiler.disable(once_differentiable(backward))  # type: ignore[no-any-return]


def _nothing(*args: Any) -> None:
    """The fake of an operator that returns nothing."""


# -- loss scaling ----------------------------------------------------------------------------------
#
# Each is CompositeImplicitAutograd over an autograd.Function: AOTAutograd traces into it, and the
# compiled graph is plain arithmetic.
#
# The result shares its input's memory, but as a `detach()`: autograd forbids in-place writes to a
# view that an autograd.Function returns, and a program may well write to our graph's results.
#
# They are differentiable once. In a second differentiation the gradient would enter in the middle,
# unscaled, and leave divided by the scale. It is refused, as AOTAutograd does for compiled graphs.

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
    @differentiable_once
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
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (scale,), (grad,) = ctx.saved_tensors, grads
        if grad is None:
            return None, None, None
        values = sparse_values(grad) if grad.is_sparse else grad  # nn.Embedding(sparse=True)
        overflow = values.isfinite().logical_not().any().to(torch.float32)
        # Scales are powers of two by default, so the product with the inverse is exact.
        return grad * scale.reciprocal(), None, overflow


_LIBRARY.impl("scale_grad", ScaleGrad.apply, "CompositeImplicitAutograd")
_LIBRARY.impl("unscale_grad", UnscaleGrad.apply, "CompositeImplicitAutograd")

# -- a copy in place of a cast ---------------------------------------------------------------------

_LIBRARY.define("read_copy(Tensor master, Tensor(a) copy) -> Tensor(a)")


class _ReadCopy(torch.autograd.Function):
    """The copy of a weight, as if it were cast now: its gradient is widened, and the weight's."""

    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = master.shape, master.dtype
        ctx.set_materialize_grads(False)
        return copy.detach()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        real = tuple(map(slice, ctx.shape))  # a copy may be stored padded
        return None if grads[0] is None else grads[0][real].to(ctx.dtype), None


_LIBRARY.impl("read_copy", _ReadCopy.apply, "CompositeImplicitAutograd")

# -- softmax at O2 ---------------------------------------------------------------------------------

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
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        p, grad = result.to(ctx.dtype), grads[0].to(ctx.dtype)
        return p * (grad - (p * grad).sum(ctx.dim, keepdim=True)), None, None, None


_LIBRARY.define("multilabel_margin_losses(Tensor x, Tensor target) -> Tensor")


def _multilabel_margin_losses(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of each sample: the sum over its labels, those before the first -1, and over all classes that
    are none of them, of max(0, 1 - x[label] + x[class]) / classes.
    """
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    given = (labels == -1).cumsum(1) == 0
    index = labels.where(given, 0)
    is_label = torch.zeros_like(rows).scatter_add(1, index, given.to(rows.dtype)) > 0
    margins = (1 - rows.gather(1, index).unsqueeze(2) + rows.unsqueeze(1)).relu()
    counted = given.unsqueeze(2) & ~is_label.unsqueeze(1)
    losses: torch.Tensor = margins.where(counted, 0).sum((1, 2)) / rows.shape[1]
    return losses.reshape(x.shape[:-1])


_LIBRARY.impl("multilabel_margin_losses", _multilabel_margin_losses, "CompositeImplicitAutograd")
_LIBRARY.impl("softmax_low", _SoftmaxLow.apply, "CompositeImplicitAutograd")

# -- a value that is computed once -----------------------------------------------------------------


# A copy that no fusion reaches across. Inductor inlines what is computed from few values into each
# loop that reads it, and hands a value of the low dtype on within a loop without its rounding. What
# lies in this copy's memory was rounded, and the partitioner, which doesn't compute it again, keeps
# it for the backward.
_define("kept(Tensor values) -> Tensor", torch.clone, torch.clone)
torch.library.register_autograd("mpcompile::kept", lambda _, gradient: gradient, lib=_LIBRARY)

# -- many tensors at once --------------------------------------------------------------------------


def _cast_all(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Each in memory of its own, laid out as it was. On a GPU that is one kernel, where each cast
    by itself would be one.
    """
    made = _fake_cast_all(tensors, dtype)
    copy_all(made, list(tensors))
    return made


def _fake_cast_all(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty_like(t, dtype=dtype) for t in tensors]


def _unscale_all(
    gradients: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor
) -> None:
    """Each gradient times `inverse`, in place; `found` = 1 if an element was inf or nan. It is the
    kernel that GradScaler launches for all gradients of an optimizer.
    """
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default(gradients, found, inverse)


_CAST = "cast_all(Tensor[] tensors, ScalarType dtype) -> Tensor[]"
_UNSCALE = "unscale_all(Tensor(a!)[] gradients, Tensor(b!) found, Tensor inverse) -> ()"
_define(_CAST, _cast_all, _fake_cast_all, fixed_layout=True)
_define(_UNSCALE, _unscale_all, _nothing, fixed_layout=True)

# -- places in a traced training step --------------------------------------------------------------

# The gradient of a loss itself, with which the backward begins.
_define("begin_backward(Tensor loss) -> Tensor", torch.ones_like, torch.ones_like)


def _take_step(number: int, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """Only a mark: `mpcompile/whole_step` puts the optimizer's own step there."""
    raise RuntimeError(
        f"mpcompile::take_step({number}, ...) marks a place in a graph; it can't run"
    )


# It writes to the parameters, so no tracer takes it for dead code, or moves reads across it.
_define("take_step(int number, Tensor(a!)[] params, Tensor[] grads) -> ()", _take_step, _nothing)
