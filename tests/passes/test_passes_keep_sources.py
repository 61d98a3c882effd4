"""keep_sources: what is cast again in the backward, and what is kept as it was."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_of import module_of
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mpcompile import MPCompileWarning, ir, mpcompile
from mpcompile.demo.train import bytes_saved_for_backward
from mpcompile.devices.cpu import CPU
from mpcompile.ir import aten
from mpcompile.lower import emitter
from mpcompile.passes.joint.kept_for_backward import WEIGHT, keep_sources, keep_written_inputs
from mpcompile.torch_inside.inductor import UNCHECKED

BF16 = torch.bfloat16
CONVERT = torch.ops.prims.convert_element_type.default
ROWS, WIDTH, WORDS = 64, 32, 96
LOGITS = ROWS * WORDS


class Head(nn.Module):
    """As a language model of Hugging Face's: it returns its logits beside their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(F.gelu(self.first(x)))
        return F.cross_entropy(logits.float().view(-1, WORDS), y), logits


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(WORDS, (rows,), generator=generator)


def made(build: Callable[[], nn.Module] = Head) -> nn.Module:
    torch.manual_seed(0)
    return build()


def trained(model: nn.Module, **options: Any) -> tuple[Tensor, dict[str, Tensor], int]:
    """The loss, the gradients, and the bytes that were kept between."""
    torch._dynamo.reset()
    mpcompile(model, dtype=BF16, **options)
    x, y = batch()
    model(x, y)[0].backward()
    model.zero_grad()
    with bytes_saved_for_backward(model) as saved:
        loss = model(x, y)[0]
    loss.backward()
    kept = sum(n for at, n in saved.items() if at != x.untyped_storage().data_ptr())
    return (
        loss.detach(),
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        kept,
    )


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int]]:
    """How many bytes the pass saves, and how many it leaves; what is computed must stay. As on a
    GPU, which keeps more: where operands are made again, so are their casts.
    """
    monkeypatch.setattr(CPU, "recomputes", False)

    def run(
        build: Callable[[], nn.Module] = Head, rtol: float = 0, atol: float = 0, **options: Any
    ) -> tuple[int, int]:
        loss, gradients, kept = trained(made(build), **options)
        with monkeypatch.context() as patched:
            patched.setattr(emitter, "_KEPT", (keep_written_inputs,))
            same_loss, same, stored = trained(made(build), **options)
        assert torch.equal(loss, same_loss)
        torch.testing.assert_close(gradients, same, rtol=rtol, atol=atol)
        return stored - kept, kept

    return run


class Bent(Head):
    """Its logits went through a function that autograd keeps the operand of."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.silu(self.head(F.gelu(self.first(x))).float())
        return F.cross_entropy(logits, y), logits


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_results_are_made_again_of_what_is_kept(compared: Callable[..., tuple[int, int]]) -> None:
    saved, _ = compared(Bent, rtol=1e-2, atol=1e-6, emit="inductor")
    assert saved == 4 * LOGITS  # the low logits are kept anyway


@pytest.mark.slow("compiles by Inductor, or a deep model")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_logits_are_kept_low(level: str, compared: Callable[..., tuple[int, int]]) -> None:
    saved, _ = compared(level=level, emit="inductor")
    assert saved == 2 * LOGITS  # FP32 logits become low ones


def test_casts_of_weights_without_inductor(compared: Callable[..., tuple[int, int]]) -> None:
    saved, _ = compared(emit="aot_eager")
    assert saved == 2 * WIDTH * WORDS


class Checkpointed(nn.Module):
    """Blocks of which a checkpoint keeps the input, or selectively what its products make."""

    def __init__(self, selective: bool) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(3))
        more = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])
        self.options: dict[str, Any] = {"context_fn": more} if selective else {}

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, **self.options)
        return (x.square().mean(),)


@pytest.mark.slow("compiles by Inductor, or a deep model")
@pytest.mark.parametrize("selective", [False, True])
def test_a_checkpoint_keeps_no_casts_of_weights(
    selective: bool, compared: Callable[..., tuple[int, int]]
) -> None:
    saved, kept = compared(functools.partial(Checkpointed, selective), emit="inductor")
    weights = 2 * 3 - 1  # the first gives no gradient on
    assert saved == 2 * weights * (4 * WIDTH * WIDTH)
    if not selective:  # what enters each block, and what leaves the last
        assert kept <= 4 * (4 * ROWS * WIDTH)


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_a_weight_is_cast_again_where_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "recomputes", False)
    kept, sparing = (trained(made(), recompute=asked)[-1] for asked in (False, True))
    assert kept - sparing >= 2 * WIDTH * WORDS  # the head's; nothing reads the first layer's


def test_a_fused_head_wants_the_loss_alone() -> None:
    both = mpcompile(made(), dtype=BF16, emit="aot_eager", fuse_head=True)
    with pytest.warns(MPCompileWarning, match="returns the loss alone: `mpcompile"):
        both(*batch())


def test_autograd_notices_that_a_weight_was_written() -> None:
    model = mpcompile(made(), dtype=BF16, emit="aot_eager")
    loss, _ = model(*batch())
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_cast_that_is_kept_is_that_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under autocast: a weight may be written between forward and backward. Not on a CPU."""
    monkeypatch.setattr(CPU, "recomputes", False)
    model = mpcompile(made(), dtype=BF16, emit="inductor")
    model(*batch())[0].backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss, _ = model(*batch())
    with torch.no_grad():
        model.head.weight.mul_(2)
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted, rtol=0, atol=0)


def codebook(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor]:
    """Multiplies by a buffer, and then moves it."""
    scores = self.first(x) @ self.book
    with torch.no_grad():
        self.book.copy_(-self.book)
    return (F.cross_entropy(scores.float(), y),)


@pytest.mark.slow_rows("compiles by Inductor, or a deep model")
@pytest.mark.parametrize("emit", ["aot_eager", "inductor"])
def test_a_weight_that_the_forward_writes_is_kept_as_it_was(emit: str) -> None:
    model = made(
        lambda: module_of(
            codebook, first=nn.Linear(WIDTH, WIDTH), book=nn.Buffer(torch.randn(WIDTH, WORDS))
        )
    )
    eager = copy.deepcopy(model)
    x, y = batch()
    scores = eager.first(x) @ eager.book.clone()
    F.cross_entropy(scores, y).backward()
    mpcompile(model, dtype=BF16, emit=emit)
    model(x, y)[0].backward()
    ours, wanted = model.first.weight.grad, eager.first.weight.grad
    assert float((ours - wanted).norm()) < 2e-2 * float(wanted.norm())


@pytest.mark.slow_rows("compiles by Inductor, or a deep model")
@pytest.mark.parametrize("emit", ["aot_eager", "inductor"])
def test_symbolic_sizes(emit: str) -> None:
    model = made()
    eager = copy.deepcopy(model)
    mpcompile(model, dtype=BF16, emit=emit, dynamic=True)
    for rows in (ROWS, ROWS + 5):
        model.zero_grad(), eager.zero_grad()
        model(*batch(rows))[0].backward()
        eager(*batch(rows))[0].backward()
        for ours, wanted in zip(model.parameters(), eager.parameters(), strict=True):
            assert float((ours.grad - wanted.grad).norm()) < 2e-2 * float(wanted.grad.norm())


# -- the pass by itself ----------------------------------------------------------------------------


class Halves:
    """A forward and a backward, written node by node."""

    def __init__(self) -> None:
        self.forward, self.backward = fx.Graph(), fx.Graph()
        self.mode = FakeTensorMode()

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.forward.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def weight(self) -> fx.Node:
        node = self.input("weight", 4, 8)
        node.meta[WEIGHT] = True
        return node

    def call(self, name: str, target: Any, *args: Any) -> fx.Node:
        node = self.forward.create_node("call_function", target, args, name=name)
        ir.refresh(node)
        return node

    def part(self, *kept: fx.Node, recomputed: fx.Node | None = None) -> bool:
        """Keep these; whether the pass changed anything."""
        self.forward.output((None, *kept))
        read = []
        for node in kept:
            read.append(self.backward.placeholder(node.name))
            read[-1].meta = dict(node.meta)
        if recomputed is not None:
            again = self.backward.create_node(
                "call_function", aten.sin.default, (read[0],), name=recomputed.name
            )
            ir.refresh(again)
            read.append(again)
        results = [self.backward.call_function(aten.sin.default, (node,)) for node in read]
        for node in results:
            ir.refresh(node)
        self.backward.output(tuple(results))
        changed = keep_sources(self.forward, self.backward, 1)
        self.forward.lint()
        self.backward.lint()
        return changed

    @property
    def kept(self) -> list[str]:
        (_, *kept), *_ = self.forward.output_node().args
        inputs = self.backward.find_nodes(op="placeholder")
        assert [node.name for node in kept] == [node.target for node in inputs]
        return [node.target for node in inputs]


def test_a_cast_of_a_weight() -> None:
    halves = Halves()
    weight = halves.weight()
    low = halves.call("low", CONVERT, weight, BF16)
    turned = halves.call("turned", aten.t.default, low)
    assert halves.part(turned)
    assert halves.kept == ["weight"]
    assert ir.render(halves.backward).splitlines()[:3] == [
        "weight: f32[4, 8] = input",
        "low: bf16[4, 8] = prims::convert_element_type(weight, bf16)",
        "turned_1: bf16[8, 4] = t(low)",
    ]


def test_a_weight_that_is_kept_anyway_is_kept_once() -> None:
    halves = Halves()
    weight = halves.weight()
    assert halves.part(halves.call("low", CONVERT, weight, BF16), weight)
    assert halves.kept == ["weight"]


def test_a_cast_of_another_input_is_kept() -> None:
    halves = Halves()
    x = halves.input("x", 4, 8)
    assert not halves.part(halves.call("low", CONVERT, x, BF16))
    assert halves.kept == ["low"]


def test_a_weight_that_is_written_is_not_taken() -> None:
    halves = Halves()
    weight = halves.weight()
    low = halves.call("low", CONVERT, weight, BF16)
    halves.call("write", aten.copy_.default, weight, halves.call("sin", aten.sin.default, weight))
    assert not halves.part(low)


@pytest.mark.parametrize("unchecked", ["low", "wide"])
def test_what_autograd_does_not_check_stays(unchecked: str) -> None:
    halves = Halves()
    low = halves.call("low", aten.sin.default, halves.input("x", 4, 8, dtype=BF16))
    wide = halves.call("wide", CONVERT, low, torch.float32)
    {"low": low, "wide": wide}[unchecked].meta[UNCHECKED] = True
    assert not halves.part(wide)


class Stashes(torch.autograd.Function):
    """Keeps a tensor on `ctx` by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.wide, ctx.low = x.to(BF16).float(), weight.to(BF16)
        return x.to(BF16).float() @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.low.float().t(), ctx.wide.t() @ gradient


@pytest.mark.slow_rows("compiles by Inductor, or a deep model")
@pytest.mark.parametrize("emit", ["aot_eager", "inductor"])
def test_a_function_that_keeps_tensors_by_itself(emit: str) -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
    scale = nn.Parameter(torch.ones(WIDTH))
    x, _ = batch()

    def program(x: Tensor) -> Tensor:
        return F.gelu((Stashes.apply(x * scale, weight) @ weight).float()).square().mean()

    wanted = torch.autograd.grad(program(x), [weight, scale])
    found = torch.autograd.grad(mpcompile(program, dtype=BF16, emit=emit)(x), [weight, scale])
    for ours, exact in zip(found, wanted, strict=True):
        assert float((ours - exact).norm()) < 3e-2 * float(exact.norm())


def test_a_rounded_value_is_kept_rounded() -> None:
    halves = Halves()
    value = halves.call("value", aten.sin.default, halves.input("x", 4, 8))
    low = halves.call("low", CONVERT, value, BF16)
    assert halves.part(halves.call("wide", CONVERT, low, torch.float32))
    assert halves.kept == ["low"]


@pytest.mark.parametrize(("taken", "changes"), [(1, False), (2, False), (3, True)])
def test_parts_of_one_tensor_together(taken: int, changes: bool) -> None:
    """Each part in FP32 is a quarter of the low tensor's elements: three of them take more."""
    halves = Halves()
    low = halves.call("low", aten.sin.default, halves.input("x", 4, 16, dtype=BF16))
    parts = []
    for number in range(taken):
        part = halves.call(f"part{number}", aten.slice.Tensor, low, 1, 4 * number, 4 * number + 4)
        parts.append(halves.call(f"wide{number}", CONVERT, part, torch.float32))
    assert halves.part(*parts) is changes
    assert (halves.kept == ["low"]) is changes


def test_what_the_backward_computes_itself_is_not_handed_over() -> None:
    halves = Halves()
    low = halves.call("low", aten.sin.default, halves.input("x", 4, 8, dtype=BF16))
    wide = halves.call("wide", CONVERT, low, torch.float32)
    assert not halves.part(wide, recomputed=low)
