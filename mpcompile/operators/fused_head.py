"""The operator behind `fuse_head`: a linear layer and its cross entropy, without whole logits.

    loss = cross_entropy(x @ weight.T + bias, target)     x: (N, d), weight: (V, d), target: (N,)

The logits are made for some rows at a time, reduced to two numbers for each row (the log of the sum
of exponentials, and the loss), and dropped. The backward makes them again: that costs one more
matrix product, and at least 4*N*V bytes are never stored. With p = softmax(logits), e the label
smoothing, w the class weights, W their sum, t the row's class, and a the gradient that reaches the
row's loss (over the mean's denominator):

    loss = (1-e) * w[t] * -log p[t]  +  e/V * sum_c w[c] * -log p[c]
    d loss / d logits = a * (p * ((1-e) * w[t] + e/V * W)  -  (1-e) * w[t] * onehot(t)  -  e/V * w)

The products read x and the weight in their dtype (FP16, BF16) and return that dtype; everything
between is FP32. The incoming gradient, which holds the loss scale, multiplies in FP32 before the
only rounding to the low dtype. That is why the gradient is not made in the forward, where the scale
is unknown: softmax / N underflows FP16. Over several chunks the weight's gradient adds up in FP32.

torch's own operator of this kind, that of `nn.LinearCrossEntropyLoss(options=...)`, makes the
gradient in the forward. A graph calls this one `instead_of` it.

There are three operators. The public one is composite: AOTAutograd traces through it to the other
two, which are opaque, so a symbolic number of rows unrolls no loop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..devices.registry import capabilities
from ..torch_inside.graphs import schema_of
from ..torch_inside.names import check

NONE, MEAN, SUM = 0, 1, 2  # as in aten::cross_entropy_loss
_WORDS = {"none": NONE, "mean": MEAN, "sum": SUM}
_OF_TORCH = "torch_nn::_linear_cross_entropy_batch_chunked"  # and ..._no_reduction

LOGITS_BYTES = 2**25  # bytes of FP32 logits in one chunk
# With fewer rows in a chunk, adding up the weight's gradient (8 bytes an element and chunk) costs
# as much as the products that make it: `Capabilities.fewest_rows`.


def rows_per_chunk(rows: int, classes: int, device: torch.device) -> int:
    """How many rows of logits exist at a time.

        most = max(fewest_rows, LOGITS_BYTES / (4 * classes))
        ceil(rows / ceil(rows / most)), up to a multiple of 64

    All chunks have this size, except the last one, which has the remaining rows.
    """
    most = max(capabilities(device).fewest_rows, LOGITS_BYTES // (4 * max(classes, 1)))
    chunks = max(1, -(-rows // most))
    even = -(-rows // chunks)
    return max(64, -(-even // 64) * 64)


_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
    "int reduction, SymInt ignore_index, float label_smoothing, int? chunk"
)
_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")


def _define(schema: str) -> None:
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


_define(f"linear_cross_entropy({_ARGUMENTS}=None) -> Tensor")
_define(f"linear_cross_entropy_forward({_ARGUMENTS}) -> (Tensor loss, Tensor lse)")
_define(
    f"linear_cross_entropy_backward(Tensor grad, {_ARGUMENTS}, Tensor lse, bool[3] wanted)"
    " -> (Tensor x, Tensor weight, Tensor bias)"
)


@dataclass(frozen=True)
class _Loss:
    """The arguments of a cross entropy, and the weights of its rows and classes.

    Attributes:
        wide: the dtype to compute in.
    """

    target: Tensor
    class_weight: Tensor | None
    reduction: int
    ignore_index: int
    smoothing: float
    classes: int
    wide: torch.dtype

    @functools.cached_property
    def ignored(self) -> Tensor:
        return self.target == self.ignore_index

    @functools.cached_property
    def column(self) -> Tensor:
        """(N, 1): the class of each row; for ignored rows, a class that exists (0)."""
        return self.target.masked_fill(self.ignored, 0).unsqueeze(1)

    @functools.cached_property
    def row_weights(self) -> Tensor:
        """(N,): the weight of each row's class, 0 for ignored rows."""
        if self.class_weight is None:
            return self.ignored.logical_not().to(self.wide)
        weights = self.class_weight.to(self.wide)[self.column.squeeze(1)]
        return weights.masked_fill(self.ignored, 0)

    @functools.cached_property
    def class_weights(self) -> Tensor | None:
        return None if self.class_weight is None else self.class_weight.to(self.wide)

    @functools.cached_property
    def weight_of_all(self) -> Tensor | int:
        return self.classes if self.class_weights is None else self.class_weights.sum()

    @property
    def spread(self) -> float:
        """The share of the smoothing that each class gets."""
        return self.smoothing / self.classes

    def reduce(self, losses: Tensor) -> Tensor:
        if self.reduction == NONE:
            return losses
        total = losses.sum()
        return total / self.row_weights.sum() if self.reduction == MEAN else total

    def row_gradients(self, grad: Tensor) -> Tensor:
        """(N,): the gradient that reaches each row's loss, 0 for ignored rows."""
        grad = grad.to(self.wide)
        if self.reduction == MEAN:
            grad = grad / self.row_weights.sum()
        return grad.expand(self.target.shape).masked_fill(self.ignored, 0)


def _chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their logits in the wide dtype, the buffer of the product) for each chunk.

    All chunks use the same two buffers, which are the same buffer if x has the wide dtype.
    """
    size = (min(chunk, x.shape[0]), weight.shape[0])
    product = x.new_empty(size)
    logits = product if x.dtype is _wide(x) else x.new_empty(size, dtype=_wide(x))
    for start in range(0, x.shape[0], chunk):
        rows = slice(start, min(start + chunk, x.shape[0]))
        count = rows.stop - start
        torch.mm(x[rows], weight.t(), out=product[:count])
        if logits is not product:
            logits[:count].copy_(product[:count])
        if bias is not None:
            logits[:count].add_(bias)
        yield rows, logits[:count], product[:count]


def _check(x: Tensor, weight: Tensor, target: Tensor) -> None:
    check(x.dim() == weight.dim() == 2, lambda: "x and weight must be matrices")
    check(x.dtype == weight.dtype, lambda: f"x is {x.dtype}, weight {weight.dtype}")
    check(target.dtype == torch.int64, lambda: f"target must be int64, not {target.dtype}")
    check(x.shape[0] == target.shape[0], lambda: "x and target differ in their rows")
    check(x.shape[1] == weight.shape[1], lambda: "x and weight differ in their columns")


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    reduction: int, ignore_index: int, label_smoothing: float, chunk: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(x, weight, target)
    settings = (target, class_weight, reduction, ignore_index, label_smoothing)
    loss = _Loss(*settings, classes=weight.shape[0], wide=_wide(x))
    chunk = chunk or rows_per_chunk(x.shape[0], weight.shape[0], x.device)
    lse, at_class, at_all = x.new_empty(3, x.shape[0], dtype=loss.wide).unbind()
    for rows, z, _ in _chunks(x, weight, bias, chunk):
        # What log_softmax computes, but in place.
        largest = z.amax(1, keepdim=True)
        z.sub_(largest)
        at_class[rows] = z.gather(1, loss.column[rows]).squeeze(1)
        if label_smoothing:
            at_all[rows] = z.sum(1) if loss.class_weights is None else z @ loss.class_weights
        sums = z.exp_().sum(1).log_()
        lse[rows] = sums
        at_class[rows] -= sums
        if label_smoothing:
            at_all[rows] -= sums * loss.weight_of_all
        lse[rows] += largest.squeeze(1)
    losses = -at_class * loss.row_weights
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - loss.spread * at_all
    return loss.reduce(losses.masked_fill_(loss.ignored, 0)), lse.clone()


def _backward(
    grad: Tensor,
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    reduction: int, ignore_index: int, label_smoothing: float, chunk: int | None,
    lse: Tensor, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    settings = (target, class_weight, reduction, ignore_index, label_smoothing)
    loss = _Loss(*settings, classes=weight.shape[0], wide=_wide(x))
    chunk = chunk or rows_per_chunk(x.shape[0], weight.shape[0], x.device)
    grads = loss.row_gradients(grad)
    at_class = grads * loss.row_weights * (1 - label_smoothing)
    at_all = at_class + grads * (loss.spread * loss.weight_of_all)
    x_grad, weight_grad, bias_grad = _gradients(x, weight, bias, wanted)
    several = x.shape[0] > chunk
    weight_sum = torch.zeros_like(weight_grad, dtype=loss.wide) if several else weight_grad
    bias_sum = torch.zeros_like(bias_grad, dtype=loss.wide)
    for rows, z, low in _chunks(x, weight, bias, chunk):
        z.sub_(lse[rows].unsqueeze(1)).exp_().mul_(at_all[rows].unsqueeze(1))
        if label_smoothing and loss.class_weights is not None:
            z.addr_(grads[rows], loss.class_weights, alpha=-loss.spread)
        elif label_smoothing:
            z.sub_(grads[rows].unsqueeze(1), alpha=loss.spread)
        column = loss.column[rows]
        z.scatter_(1, column, z.gather(1, column) - at_class[rows].unsqueeze(1))
        if wanted[2]:
            bias_sum += z.sum(0)
        if low is not z:
            low.copy_(z)  # the only rounding; z already holds the loss scale
        if wanted[0]:
            torch.mm(low, weight, out=x_grad[rows])
        if wanted[1] and several:
            weight_sum += low.t() @ x[rows]
        elif wanted[1]:
            torch.mm(low.t(), x, out=weight_grad)
    if several:
        weight_grad.copy_(weight_sum)
    return x_grad, weight_grad, bias_grad.copy_(bias_sum)


def _gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros for the gradients that are wanted; empty tensors for the others."""
    made = [
        x.new_zeros(value.shape, dtype=value.dtype)
        if value is not None and want
        else x.new_zeros(0)
        for value, want in zip((x, weight, bias), wanted, strict=True)
    ]
    return made[0], made[1], made[2]


def _fake_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    reduction: int, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(x, weight, target)
    lse = x.new_empty(x.shape[0], dtype=_wide(x))
    return lse.new_empty(x.shape[:1] if reduction == NONE else ()), lse


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(x, weight, bias, wanted=rest[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, reduction, ignore_index, label_smoothing, chunk = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.settings = reduction, ignore_index, label_smoothing, chunk
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, lse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    backward = torch.ops.mpcompile.linear_cross_entropy_backward.default
    made = backward(grad, *tensors, *ctx.settings, lse, wanted)
    grads = [value if want else None for value, want in zip(made, wanted, strict=True)]
    return (*grads, *[None] * 6)


def _refuse(ctx: Any, *grads: Tensor | None) -> Tensor:
    raise RuntimeError("mpcompile::linear_cross_entropy is differentiable once")


def _composite(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    reduction: int, ignore_index: int, label_smoothing: float, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    forward = torch.ops.mpcompile.linear_cross_entropy_forward.default
    settings = (reduction, ignore_index, label_smoothing, chunk)
    loss: Tensor = forward(x, weight, bias, target, class_weight, *settings)[0]
    return loss


def instead_of(target: Any, args: tuple[Any, ...]) -> Any:
    """What torch's operator of this kind returns for these arguments, computed by ours, but for the
    gradients that torch's makes; None if the target is another one.
    """
    declared = schema_of(target)
    if declared is None or not declared.name.startswith(_OF_TORCH):
        return None
    given = dict(zip((argument.name for argument in declared.arguments), args, strict=True))
    names = ("input", "linear_weight", "linear_bias", "target", "weight")
    tensors = [given[name] for name in names]
    chunk = given["batch_chunk_size"]
    loss = torch.ops.mpcompile.linear_cross_entropy.default(
        *tensors,
        _WORDS[given.get("reduction", "none")],
        given["ignore_index"],
        given.get("label_smoothing", 0.0),
        chunk if isinstance(chunk, int) else None,
    )
    return loss if len(declared.returns) == 1 else (loss, None, None, None)


def _register(name: str, kernel: Any, fake: Any) -> None:
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mpcompile::{name}", fake, lib=_LIBRARY)


_LIBRARY.impl("linear_cross_entropy", _composite, "CompositeImplicitAutograd")
_register("linear_cross_entropy_forward", _forward, _fake_forward)
_register("linear_cross_entropy_backward", _backward, _fake_backward)
torch.library.register_autograd(
    "mpcompile::linear_cross_entropy_forward", _differentiate, setup_context=_setup, lib=_LIBRARY
)
torch.library.register_autograd("mpcompile::linear_cross_entropy_backward", _refuse, lib=_LIBRARY)
