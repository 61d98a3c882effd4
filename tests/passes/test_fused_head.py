"""linear_cross_entropy: the numbers of a linear layer and its cross entropy, in chunks of rows."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import check
from heads import FUSED
from hypothesis import given, settings
from hypothesis import strategies as st
from module_of import module_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mpcompile.operators import fused_head
from mpcompile.operators.fused_head import LOGITS_BYTES, rows_per_chunk

linear_cross_entropy = torch.ops.mpcompile.linear_cross_entropy
REDUCTIONS = ("none", "mean", "sum")  # in the order of their numbers
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@dataclass(frozen=True)
class Case:
    """A head, what it reads, and the arguments of its loss."""

    rows: int = 37
    columns: int = 12
    classes: int = 23
    bias: bool = True
    weighted: bool = False
    reduction: str = "mean"
    ignore_index: int = -100
    ignored: float = 0.0  # the share of rows
    smoothing: float = 0.0
    chunk: int | None = None
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def inputs(self) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """(x, weight and perhaps a bias), target, class weights."""
        torch.manual_seed(self.seed)
        shapes = [(self.rows, self.columns), (self.classes, self.columns), (self.classes,)]
        leaves = [torch.randn(s, dtype=torch.float64) for s in shapes[: 2 + self.bias]]
        leaves = [leaf.to(self.dtype).requires_grad_() for leaf in leaves]
        target = torch.randint(0, self.classes, (self.rows,))
        target[torch.rand(self.rows) < self.ignored] = self.ignore_index
        wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        return leaves, target, torch.rand(self.classes, dtype=wide) if self.weighted else None

    def run(self, *, scale: float = 1.0) -> tuple[Tensor, ...]:
        """The loss and the gradients, by the operator."""
        leaves, target, weight = self.inputs()
        x, matrix, bias = (*leaves, None)[:3]
        reduction = REDUCTIONS.index(self.reduction)
        arguments = (reduction, self.ignore_index, self.smoothing, self.chunk)
        loss = linear_cross_entropy(x, matrix, bias, target, weight, *arguments)
        return loss, *torch.autograd.grad(loss, leaves, _weights(loss) * scale)

    def reference(self, *, scale: float = 1.0) -> tuple[Tensor, ...]:
        """The same in FP64, with the logits as one tensor."""
        leaves, target, weight = self.inputs()
        leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
        loss = F.cross_entropy(
            F.linear(*leaves), target, None if weight is None else weight.double(),
            ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.smoothing,
        )  # fmt: skip
        return loss, *torch.autograd.grad(loss, leaves, _weights(loss) * scale)


def _weights(loss: Tensor) -> Tensor:
    """A gradient for the loss that differs from row to row."""
    return torch.linspace(-0.5, 2.5, loss.numel(), dtype=loss.dtype).view(loss.shape)


@given(
    case=st.builds(
        Case, rows=st.integers(0, 40), columns=st.integers(1, 9), classes=st.integers(1, 30),
        bias=st.booleans(), weighted=st.booleans(), reduction=st.sampled_from(REDUCTIONS),
        ignore_index=st.sampled_from([-100, -1, 0]), ignored=st.sampled_from([0.0, 0.3, 1.0]),
        smoothing=st.sampled_from([0.0, 0.1, 1.0]), chunk=st.sampled_from([None, 1, 7, 16, 40]),
        seed=st.integers(0, 5),
    )
)  # fmt: skip
@settings(max_examples=150, deadline=None, derandomize=True)
def test_equals_cross_entropy(case: Case) -> None:
    for mine, theirs in zip(case.run(), case.reference(), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@HALVES
def test_low_operands(
    dtype: torch.dtype, reduction: str, smoothing: float, chunk: int | None
) -> None:
    """The loss in FP32, gradients in the dtype of what they belong to, as near as they can be."""
    case = Case(dtype=dtype, reduction=reduction, smoothing=smoothing, chunk=chunk, weighted=True)
    results, wanted = case.run(), case.reference()
    assert [r.dtype for r in results] == [torch.float32, dtype, dtype, dtype]
    for mine, theirs in zip(results, wanted, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < 2 * torch.finfo(dtype).eps


def test_gradients_that_underflow_without_the_loss_scale() -> None:
    """A mean over many rows: the scale multiplies before anything is rounded to FP16."""
    case = Case(rows=4096, classes=50, bias=False, dtype=torch.float16)
    plain, scaled = (case.run(scale=s)[1] for s in (2.0**-9, 2.0**7))
    wanted = case.reference(scale=2.0**-9)[1]
    kept = scaled.double() / 2.0**16
    assert (kept - wanted).norm() < 1e-3 * wanted.norm()
    assert (plain.double() - wanted).norm() > 0.1 * wanted.norm()


def test_the_weight_gradient_adds_up_in_fp32() -> None:
    """Equal rows, so that every chunk adds the same: BF16 sums would stop growing."""
    x, weight = torch.ones(512, 8).bfloat16(), torch.zeros(4, 8).bfloat16().requires_grad_()
    target = torch.zeros(512, dtype=torch.int64)
    linear_cross_entropy(x, weight, None, target, None, 2, -100, 0.0, 1).backward()
    assert torch.equal(weight.grad[0], torch.full((8,), -384.0).bfloat16())


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_gradient_that_nobody_wants_is_none(frozen: int) -> None:
    leaves, target, _ = Case().inputs()
    leaves[frozen].requires_grad_(False)
    linear_cross_entropy(*leaves, target, None, 1, -100, 0.0).backward()
    assert [leaf.grad is None for leaf in leaves] == [i == frozen for i in range(3)]


def test_twice_differentiated_is_refused() -> None:
    leaves, target, _ = Case().inputs()
    loss = linear_cross_entropy(*leaves, target, None, 1, -100, 0.0)
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grads[0].sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 5, 2)}, "must be matrices"),
        ({"x": torch.ones(5, 2).half()}, "x is torch.float16, weight torch.float32"),
        ({"target": torch.zeros(5)}, "target must be int64"),
        ({"target": torch.zeros(6, dtype=torch.int64)}, "differ in their rows"),
        ({"weight": torch.ones(4, 3)}, "differ in their columns"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Tensor], message: str) -> None:
    good = {"x": torch.ones(5, 2), "weight": torch.ones(4, 2)}
    x, weight, target = {**good, "target": torch.zeros(5, dtype=torch.int64), **change}.values()
    with pytest.raises(RuntimeError, match=message):
        linear_cross_entropy(x, weight, None, target, None, 1, -100, 0.0)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has none")
@pytest.mark.parametrize(("level", "emit"), [("O1", "eager"), ("O2", "aot_eager")])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@HALVES
def test_torchs_module_in_chunks(
    dtype: torch.dtype, reduction: str, bias: bool, level: str, emit: str
) -> None:
    """Its products are low, and the loss scale reaches its gradients before they are rounded."""
    options = nn.LinearCrossEntropyOptions(
        batch_chunk_size=64, chunking_method=None, allow_retain_graph=True
    )
    loss = nn.LinearCrossEntropyLoss(
        16, 50, bias=bias, ignore_index=3, reduction=reduction, options=options
    )
    model = module_of(  # the gradient of each row is another one
        lambda m, x, target: m.loss(m.body(x), target).log1p(), body=nn.Linear(16, 16), loss=loss
    )
    x, target = torch.randn(300, 16), torch.randint(50, (300,))
    check(model, x, target, dtype=dtype, level=level, emit=emit, low=["linear", FUSED])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@HALVES
def test_opcheck(dtype: torch.dtype, reduction: str) -> None:
    case = Case(rows=9, classes=5, dtype=dtype, weighted=True, smoothing=0.1)
    (x, weight, bias), target, class_weight = case.inputs()
    number = REDUCTIONS.index(reduction)
    inputs = (x, weight, bias, target, class_weight, number, -100, 0.1, 4)
    ops = torch.ops.mpcompile
    torch.library.opcheck(ops.linear_cross_entropy.default, inputs)
    torch.library.opcheck(ops.linear_cross_entropy_forward.default, inputs)
    detached = tuple(a.detach() if isinstance(a, Tensor) else a for a in inputs)
    loss, lse = ops.linear_cross_entropy_forward.default(*detached)
    for wanted in ([True] * 3, [False, True, False]):
        given = (torch.ones_like(loss), *detached, lse, wanted)
        torch.library.opcheck(ops.linear_cross_entropy_backward.default, given)


@pytest.mark.parametrize(("device", "fewest"), [("cpu", 256), ("cuda", 1024)])
@given(rows=st.integers(0, 10**6), classes=st.integers(1, 10**6))
def test_the_rule_for_chunks(device: str, fewest: int, rows: int, classes: int) -> None:
    chunk = rows_per_chunk(rows, classes, torch.device(device))
    assert chunk % 64 == 0
    assert chunk <= max(fewest, LOGITS_BYTES // (4 * classes)) + 63
    if rows > chunk:  # at least half as many as may be
        assert 2 * chunk >= max(fewest, LOGITS_BYTES // (4 * classes))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return result


def test_no_tensor_is_larger_than_a_chunk() -> None:
    """Of the implementations themselves: a mode does not see inside the operators."""
    case = Case(rows=256, columns=8, classes=512, dtype=torch.bfloat16)
    (x, weight, bias), target, _ = case.inputs()
    arguments = (x.detach(), weight.detach(), bias.detach(), target, None, 1, -100, 0.1, 16)
    with Largest() as forward:
        _, lse = fused_head._forward(*arguments)
    with Largest() as backward:
        fused_head._backward(torch.ones(()), *arguments, lse, [True, True, True])
    assert forward.bytes == backward.bytes == 4 * 16 * 512


@pytest.mark.gpu
@HALVES
def test_on_cuda(dtype: torch.dtype) -> None:
    """The same numbers, and nothing waits for the device."""
    case = Case(dtype=dtype, weighted=True, smoothing=0.1, ignored=0.3, chunk=8)
    leaves, target, class_weight = case.inputs()
    x, weight, bias = (leaf.detach().cuda().requires_grad_() for leaf in leaves)
    target, class_weight = target.cuda(), class_weight.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(x, weight, bias, target, class_weight, 1, -100, 0.1, 8)
        grads = torch.autograd.grad(loss, (x, weight, bias))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = case.reference(scale=1 / _weights(loss.cpu()).item())
    for mine, theirs in zip((loss, *grads), wanted, strict=True):
        error = (mine.double().cpu() - theirs).norm() / theirs.norm()
        assert error < 2 * torch.finfo(dtype).eps
