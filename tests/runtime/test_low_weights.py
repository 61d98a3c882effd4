"""Models whose weights are stored in BF16 or FP16 already, against FP64."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompile import (
    MPCompileWarning,
    MPOptimizer,
    compiled_plans,
    explain,
    mpcompile,
    plan_for,
    train_step,
)

RECOMPUTED = pytest.mark.sweep("compiles a recomputed backward by Inductor")

BF16, WORDS, WIDTH = torch.bfloat16, 61, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    """Returns logits; the head is tied. `recompute`: its blocks are checkpointed."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.recompute = recompute
        for p in self.parameters():
            nn.init.normal_(p, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        return self.head(self.norm(h))


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, base.in_features, dtype=dtype) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 4, dtype=dtype) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        update = F.linear(F.linear(x.to(self.a.dtype), self.a), self.b)
        return y + update.to(y.dtype)


def adapted(model: GPT, dtype: torch.dtype) -> GPT:
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name), dtype))
    return model


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), y.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(WORDS, (4, 9))
    return words[:, :-1], words[:, 1:]


def in_double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def compare(model: Any, exact: nn.Module, *, tolerance: float, size: float = 1.0) -> torch.Tensor:
    """Assert that loss and gradients are those of FP64, and that frozen parameters get none.
    Returns the model's result.
    """
    x, y = batch()
    result: torch.Tensor = model(x)
    (loss_of(result, y) * size).backward()
    (loss_of(exact(x), y) * size).backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (p.grad is not None) == p.requires_grad, name
        if p.grad is not None:
            error = (p.grad.double() - q.grad).norm() / q.grad.norm()
            assert 0 < error < tolerance, name
    return result


def options(**more: Any) -> dict[str, Any]:
    return {"emit": "aot_eager", "strict": True, **more}


@pytest.mark.slow("compiles several models")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_all_weights_bf16(level: str, recompute: bool) -> None:
    model = GPT(recompute=recompute).to(BF16)
    exact = in_double(model)
    mpcompile(model, **options(level=level))
    assert compare(model, exact, tolerance=0.05).dtype is BF16
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16}
    assert {t.dtype for t in model.state_dict().values()} == {BF16}


def test_norms_softmax_and_losses_are_computed_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1)).to(BF16)
    mpcompile(model, **options())
    model(torch.randn(4, 8, dtype=BF16)).sum().backward()
    (plan,) = compiled_plans(model)
    found = {node.op: (node.precision, node.planned[:3]) for node in plan.nodes}
    assert found["aten::linear"][0] == "LOW"
    assert found["aten::layer_norm"] == ("FULL", "f32")
    assert found["aten::softmax"] == ("FULL", "f32")


class WithLoss(GPT):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(super().forward(x).flatten(0, 1), y.flatten())


@pytest.mark.slow("compiles several models")
@pytest.mark.parametrize(
    "more",
    [{"fuse_head": True}, {"fuse_head": True, "level": "O2"}, {"pad": "always"},
     pytest.param({"emit": "inductor", "level": "O2", "recompute": True}, marks=RECOMPUTED)],
    ids=str,
)  # fmt: skip
def test_other_options(more: dict[str, Any]) -> None:
    model = WithLoss().to(BF16)
    exact = in_double(model)
    mpcompile(model, **options(**more))
    x, y = batch()
    mine, theirs = model(x, y), exact(x, y)
    mine.backward()
    theirs.backward()
    assert mine.dtype is BF16
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert p.grad.dtype is BF16
        assert 0 < (p.grad.double() - q.grad).norm() < 0.05 * q.grad.norm(), name
    if "fuse_head" in more:
        (plan,) = compiled_plans(model)
        assert any("linear_cross_entropy" in node.op for node in plan.nodes)


@pytest.mark.slow("compiles several models")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lora_on_a_bf16_base(level: str, dtype: torch.dtype) -> None:
    model = adapted(GPT().to(BF16), dtype)
    exact = in_double(model)
    mpcompile(model, **options(level=level))
    seen: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        result = compare(model, exact, tolerance=0.05)
    assert result.dtype is BF16
    (plan,) = compiled_plans(model)
    products = [n for n in plan.nodes if n.op in ("aten::linear", "aten::embedding")]
    assert {n.precision for n in products} == {"LOW"}
    casts = [n for n in plan.nodes if n.rule == "cast" and n.planned.startswith("f32")]
    weights = [n for n in casts if n.reads[0].endswith("weight")]
    assert all("norm" in n.reads[0] or "before" in n.reads[0] or "after" in n.reads[0]
               for n in weights)  # fmt: skip
    shapes = {tuple(p.shape) for p in model.parameters() if p.ndim == 2 and not p.requires_grad}
    assert not [t for t in seen if t.dtype is torch.float32 and tuple(t.shape) in shapes]


@pytest.mark.slow("compiles several models")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lora_on_an_fp16_base(level: str) -> None:
    """Results that need a gradient are FP32: in FP16 it would enter without the loss scale."""
    model = adapted(GPT().half(), torch.float32)
    exact = in_double(model)
    mpcompile(model, **options(level=level))
    assert compare(model, exact, tolerance=0.02, size=1e-4).dtype is torch.float32
    with torch.no_grad():
        assert model(batch()[0]).dtype is torch.float16


@pytest.mark.slow("compiles several models")
def test_the_optimizer_holds_nothing_of_frozen_weights() -> None:
    model = adapted(GPT().to(BF16), BF16)
    start = copy.deepcopy(model.state_dict())
    mpcompile(model, **options())
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), emit="eager")
    for _ in range(3):
        x, y = batch()
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert (p in optimizer.state) == p.requires_grad
        assert torch.equal(p, start[name]) != p.requires_grad


# -- masters -----------------------------------------------------------------------------------


@pytest.mark.slow("compiles several models")
def test_training_is_that_of_fp32_masters() -> None:
    model = GPT().to(BF16)
    hand = copy.deepcopy(model)
    masters = [p.detach().float() for p in hand.parameters()]
    mpcompile(model, **options(level="O2"))
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), emit="eager")
    plain = torch.optim.AdamW(masters, lr=1e-4)
    for _ in range(20):
        x, y = batch()
        loss_of(model(x), y).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
    for master, p in zip(masters, model.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[p]["master"], master, rtol=1e-5, atol=1e-7)
        assert torch.equal(p, optimizer.state[p]["master"].to(BF16))


def test_gradients_that_are_added_up_in_fp32() -> None:
    """`grad_dtype`: of 64 equal backwards, BF16 sums lose what FP32 sums keep."""
    model = nn.Linear(16, 16, bias=False).to(BF16)
    wide = copy.deepcopy(model)
    wide.weight.grad_dtype = torch.float32
    x = torch.randn(8, 16, dtype=BF16)
    for m in (model, wide):
        run = mpcompile(m, **options())
        for _ in range(64):
            run(x).float().square().mean().backward()
    assert model.weight.grad is not None
    assert wide.weight.grad.dtype is torch.float32
    wanted = wide.weight.detach().double().requires_grad_()
    F.linear(x.double(), wanted).square().mean().backward()
    exact = wanted.grad * 64
    lost = (model.weight.grad.double() - exact).norm() / exact.norm()
    assert (wide.weight.grad.double() - exact).norm() / exact.norm() < 0.01 < lost
    optimizer = MPOptimizer(torch.optim.SGD(wide.parameters(), lr=1e-6), emit="eager")
    before = wide.weight.detach().float()
    optimizer.step()
    master = optimizer.state[wide.weight]["master"]
    torch.testing.assert_close(master, before - 1e-6 * wide.weight.grad, rtol=1e-6, atol=0)


@pytest.mark.slow("compiles several models")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_whole_step_is_that_of_its_pieces(level: str) -> None:
    models = [GPT().to(BF16)]
    models.append(copy.deepcopy(models[0]))
    held = [
        MPOptimizer(torch.optim.AdamW(m.parameters(), lr=1e-4), emit="eager", max_grad_norm=1.0)
        for m in models
    ]
    mpcompile(models[0], **options(level=level))
    step = train_step(models[1], held[1], loss_of, **options(level=level))
    for i in range(4):
        x, y = batch()
        loss_of(models[0](x), y).backward()
        held[0].step()
        held[0].zero_grad()
        step(x, y)
        if i == 1:
            with torch.no_grad():
                for m in models:
                    m.norm.weight.mul_(0.5)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        mine, theirs = held[1].state[q]["master"], held[0].state[p]["master"]
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert torch.equal(q, mine.to(BF16))


def test_a_plain_optimizer_in_a_whole_step_runs_in_pieces() -> None:
    model = nn.Linear(8, 8).to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = train_step(model, optimizer, lambda out, y: (out - y).square().mean(), emit="aot_eager")
    x = torch.randn(4, 8, dtype=BF16)
    with pytest.warns(MPCompileWarning, match="wrap it in an MPOptimizer"):
        step(x, x)
    assert {t.dtype for t in optimizer.state[model.weight].values()} == {BF16}


def trained_by(wrap: Callable[[Any], Any], compiled: Callable[[nn.Module], Any]) -> list[str]:
    """The warnings of three steps of a BF16 model."""
    model = nn.Linear(8, 4).to(BF16)
    run = compiled(model)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-6))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            run(torch.randn(4, 8, dtype=BF16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in found if w.category is MPCompileWarning]


def test_without_masters_one_warning_says_what_is_lost() -> None:
    def ours(model: nn.Module) -> Any:
        return mpcompile(model, **options())

    def backend(model: nn.Module) -> Any:
        return torch.compile(model, backend="mpcompile", options={"emit": "aot_eager"})

    for compiled in (ours, backend):
        (message,) = trained_by(lambda o: o, compiled)
        assert "without FP32 masters" in message
        assert "MPOptimizer(AdamW(...))" in message
        assert trained_by(lambda o: MPOptimizer(o, emit="eager"), compiled) == []


# -- plans ---------------------------------------------------------------------------------------


@pytest.mark.slow("compiles several models")
def test_plans() -> None:
    model = adapted(GPT().to(BF16), torch.float32)
    x, _ = batch()
    plan = explain(model, x)
    assert plan.dtype == "bfloat16"
    assert all(n.precision == "LOW" for g in plan.graphs for n in g.nodes if n.op == "aten::linear")
    assert plan_for(model, x, device="h100").dtype == "bfloat16"
