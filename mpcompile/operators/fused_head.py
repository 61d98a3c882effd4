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
class _Head:
    """The arguments of the operators, in their order; and what the two passes make of them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    reduction: int
    ignore_index: int
    smoothing: float
    chunk: int | None

    def check_shapes(self) -> None:
        x, weight, target = self.x, self.weight, self.target
        check(x.dim() == weight.dim() == 2, lambda: "x and weight must be matrices")
        check(x.dtype == weight.dtype, lambda: f"x is {x.dtype}, weight {weight.dtype}")
        check(target.dtype == torch.int64, lambda: f"target must be int64, not {target.dtype}")
        check(x.shape[0] == target.shape[0], lambda: "x and target differ in their rows")
        check(x.shape[1] == weight.shape[1], lambda: "x and weight differ in their columns")

    @property
    def wide(self) -> torch.dtype:
        """The dtype to compute in."""
        return torch.float64 if self.x.dtype is torch.float64 else torch.float32

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    @property
    def rows_at_once(self) -> int:
        return self.chunk or rows_per_chunk(self.x.shape[0], self.classes, self.x.device)

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
        if self.class_weights is None:
            return self.ignored.logical_not().to(self.wide)
        return self.class_weights[self.column.squeeze(1)].masked_fill(self.ignored, 0)

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

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, their logits in the wide dtype, the buffer of the product) for each chunk.

        All chunks use the same two buffers, which are the same buffer if x has the wide dtype.
        """
        x, most = self.x, self.rows_at_once
        product = x.new_empty(min(most, x.shape[0]), self.classes)
        logits = product if x.dtype is self.wide else x.new_empty(product.shape, dtype=self.wide)
        for start in range(0, x.shape[0], most):
            rows = slice(start, min(start + most, x.shape[0]))
            count = rows.stop - start
            torch.mm(x[rows], self.weight.t(), out=product[:count])
            if logits is not product:
                logits[:count].copy_(product[:count])
            if self.bias is not None:
                logits[:count].add_(self.bias)
            yield rows, logits[:count], product[:count]

    def gradients(self, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros for those that are wanted, of x, weight and bias; empty tensors for the others."""
        made = [
            self.x.new_zeros(value.shape, dtype=value.dtype)
            if value is not None and want
            else self.x.new_zeros(0)
            for value, want in zip((self.x, self.weight, self.bias), wanted, strict=True)
        ]
        return made[0], made[1], made[2]


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    head = _Head(*arguments)
    head.check_shapes()
    lse, at_class, at_all = head.x.new_empty(3, head.x.shape[0], dtype=head.wide).unbind()
    for rows, z, _ in head.chunks():
        # What log_softmax computes, but in place.
        largest = z.amax(1, keepdim=True)
        z.sub_(largest)
        at_class[rows] = z.gather(1, head.column[rows]).squeeze(1)
        if head.smoothing:
            at_all[rows] = z.sum(1) if head.class_weights is None else z @ head.class_weights
        sums = z.exp_().sum(1).log_()
        lse[rows] = sums
        at_class[rows] -= sums
        if head.smoothing:
            at_all[rows] -= sums * head.weight_of_all
        lse[rows] += largest.squeeze(1)
    losses = -at_class * head.row_weights
    if head.smoothing:
        losses = (1 - head.smoothing) * losses - head.spread * at_all
    return head.reduce(losses.masked_fill_(head.ignored, 0)), lse.clone()


def _backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *given, lse, wanted = arguments
    head = _Head(*given)
    x = head.x
    grads = head.row_gradients(grad)
    at_class = grads * head.row_weights * (1 - head.smoothing)
    at_all = at_class + grads * (head.spread * head.weight_of_all)
    x_grad, weight_grad, bias_grad = head.gradients(wanted)
    several = x.shape[0] > head.rows_at_once
    weight_sum = torch.zeros_like(weight_grad, dtype=head.wide) if several else weight_grad
    bias_sum = torch.zeros_like(bias_grad, dtype=head.wide)
    for rows, z, low in head.chunks():
        z.sub_(lse[rows].unsqueeze(1)).exp_().mul_(at_all[rows].unsqueeze(1))
        if head.smoothing and head.class_weights is not None:
            z.addr_(grads[rows], head.class_weights, alpha=-head.spread)
        elif head.smoothing:
            z.sub_(grads[rows].unsqueeze(1), alpha=head.spread)
        column = head.column[rows]
        z.scatter_(1, column, z.gather(1, column) - at_class[rows].unsqueeze(1))
        if wanted[2]:
            bias_sum += z.sum(0)
        if low is not z:
            low.copy_(z)  # the only rounding; z already holds the loss scale
        if wanted[0]:
            torch.mm(low, head.weight, out=x_grad[rows])
        if wanted[1] and several:
            weight_sum += low.t() @ x[rows]
        elif wanted[1]:
            torch.mm(low.t(), x, out=weight_grad)
    if several:
        weight_grad.copy_(weight_sum)
    return x_grad, weight_grad, bias_grad.copy_(bias_sum)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    head = _Head(*arguments)
    head.check_shapes()
    lse = head.x.new_empty(head.x.shape[0], dtype=head.wide)
    return lse.new_empty(head.x.shape[:1] if head.reduction == NONE else ()), lse


def _fake_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *given, _, wanted = arguments
    return _Head(*given).gradients(wanted)


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
