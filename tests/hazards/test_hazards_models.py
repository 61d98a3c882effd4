"""Models of many kinds: what they do with data, what is left in FP32, and the zoo's products."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import COMBINED, LEVELS, SETTINGS, assert_near, check, fallback_reason, leaf
from module_of import module_of
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

from benchmarks.zoo.catalogue import HUGGING_FACE, TIMM
from benchmarks.zoo.making import Entry
from mpcompile import MPOptimizer, compiled_plans, mpcompile


def attention() -> nn.Module:
    """nn.MultiheadAttention, which returns its averaged weights too."""
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    return module_of(lambda m, x: m.attention(x, x, x), attention=layer)


def cells_forward(self: Any, x: torch.Tensor) -> Any:
    """A recurrence written out with cells."""
    h = c = g = x.new_zeros(2, 16)
    for step in x.unbind(1):
        h, c = self.cell(step, (h, c))
        g = self.gru(h, g)
    return g, c


def experts_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A mixture of experts: top-k routing, masks, weighted sums."""
    weights, chosen = self.router(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        share = (weights * (chosen == i)).sum(-1, keepdim=True)
        out += share * expert(x)
    return out


class Rotary(nn.Module):
    """Rotary positions as Hugging Face writes them, attention scores with a mask in place."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("inverse", 10000.0 ** -(torch.arange(0, 16, 2) / 16))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            steps = torch.arange(x.shape[1], device=x.device)[:, None].float()
            angle = torch.cat([steps * self.inverse] * 2, -1)
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.rotate(self.query(x)) @ self.rotate(self.key(x)).mT / 4
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype) @ x


def hooked() -> nn.Module:
    """Module hooks: before and after."""
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    first.register_forward_hook(lambda module, args, out: out * 2)
    return module_of(lambda m, x: m.second(m.first(x)).tanh(), first=first, second=second)


def cache_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A key cache written at a position that is data."""
    key = self.key(x.transpose(0, 1))
    with torch.no_grad():
        self.cache.index_copy_(0, torch.arange(4) + self.position, key)
        self.position += 4
    return torch.einsum("tbc,sbc->bts", key, self.cache)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)


MODELS = {
    "attention": attention,
    "encoder": encoder,
    "cells": lambda: module_of(cells_forward, cell=nn.LSTMCell(16, 16), gru=nn.GRUCell(16, 16)),
    "experts": lambda: module_of(
        experts_forward,
        router=nn.Linear(16, 3),
        experts=nn.ModuleList(nn.Linear(16, 16) for _ in range(3)),
    ),
    "rotary": Rotary,
    "hooked": hooked,
    "cache": lambda: module_of(
        cache_forward,
        key=nn.Linear(16, 16),
        cache=nn.Buffer(torch.zeros(10, 2, 16)),
        position=nn.Buffer(torch.tensor(0)),
    ),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(16, 8)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(16, 8)),
}


@SETTINGS
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, level: str, emit: str) -> None:
    check(MODELS[name](), leaf(2, 4, 16), level=level, emit=emit)


# A weight that is made of a direction and a gain, `g` of all or one of each row, column or head.
GAINS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "of all": lambda m, v: m.g * v / v.norm(),
    "of rows": lambda m, v: m.rows * v / v.norm(dim=1, keepdim=True),
    "of columns": lambda m, v: m.columns * v / v.norm(dim=0, keepdim=True),
    "normalised": lambda m, v: m.rows * F.normalize(v),
    "exponentiated": lambda m, v: m.g.exp() * v / v.norm(),
    "with a floor": lambda m, v: m.g * v / v.norm().clamp(min=1e-3),
    "rooted": lambda m, v: m.g * v * v.square().sum().rsqrt(),
    "standardised": lambda m, v: m.rows * (v - v.mean(1, keepdim=True)) / v.std(1, keepdim=True),
    "of the largest": lambda m, v: m.g * v / v.abs().max(),
    "of heads": lambda m, v: (m.g * F.normalize(v.view(4, 4, 16), dim=(1, 2))).view(16, 16),
    "of a mean": lambda m, v: m.g * v / v.abs().mean(),
    "added": lambda m, v: v + m.g * v / v.norm(),
}
PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(16, 16)),
    "weight_norm of columns": lambda: parametrizations.weight_norm(nn.Linear(16, 16), dim=1),
    "weight_norm of all": lambda: parametrizations.weight_norm(nn.Linear(16, 16), dim=None),
    **{name: lambda gain=gain: gained(gain) for name, gain in GAINS.items()},
}


def gained(gain: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    sizes = {"v": (16, 16), "g": (), "rows": (16, 1), "columns": (1, 16)}
    parts = {name: nn.Parameter(torch.empty(size)) for name, size in sizes.items()}
    return module_of(lambda m, x: F.linear(x, gain(m, m.v)), **parts)


@COMBINED
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_gains_are_no_further_off_than_autocasts(name: str, how: Any) -> None:
    net = nn.Sequential(PARAMETRIZED[name](), nn.ReLU(), nn.Linear(16, 8))
    peer, exact = copy.deepcopy(net), copy.deepcopy(net).double()
    model, dtype = mpcompile(net, **how), how["dtype"]
    off: dict[nn.Module, list[torch.Tensor]] = {net: [], peer: []}
    for _ in range(8):  # the gradient of a gain is one number, off by more or less
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn_like(p) / 4 + (0 if p.numel() > 16 else 1))
        x = torch.randn(64, 16)
        for own in (peer, exact):
            own.load_state_dict(net.state_dict())
        exact(x.double()).square().mean().backward()
        model(x).square().mean().backward()
        with torch.autocast("cpu", dtype=dtype):
            out = peer(x)
        out.float().square().mean().backward()
        wanted = [p.grad for p in exact.parameters()]
        for own, errors in off.items():
            grads = [p.grad for p in own.parameters()]
            pairs = zip(grads, wanted, strict=True)
            errors += [(g - w).norm() / w.norm() for g, w in pairs if w is not None]
        for own in (net, peer, exact):
            own.zero_grad()
    ours, autocast = (torch.stack(errors).square().mean().sqrt() for errors in off.values())
    assert ours <= 1.5 * autocast + torch.finfo(dtype).eps / 4


@pytest.mark.filterwarnings("ignore:mpcompile. 50% of the product FLOPs of _Module ran in compiled")
@SETTINGS
def test_a_hook_on_the_gradient(level: str, emit: str) -> None:
    """Dynamo doesn't trace a module with such a hook; its gradient must be true to size."""
    model = hooked()
    model.second.register_full_backward_hook(lambda module, by, of: (by[0].clamp(-0.01, 0.01),))
    check(model, leaf(2, 4, 16), level=level, emit=emit, strict=False)


@SETTINGS
def test_convolutions_up_and_down(level: str, emit: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(8, 4, 3, bias=False), nn.InstanceNorm2d(4, affine=True), nn.AvgPool2d(2),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last).requires_grad_()
    options = {"low": ["conv2d", "conv_transpose2d"], "level": level, "emit": emit}
    check(model, x, **options)


@SETTINGS
def test_sparse_gradient(level: str, emit: str) -> None:
    """It stays sparse, and is checked for overflow and unscaled in that form."""

    def forward(m: Any, tokens: torch.Tensor) -> Any:
        return m.head(m.table(tokens))

    model = module_of(forward, table=nn.Embedding(20, 16, sparse=True), head=nn.Linear(16, 4))
    check(model, torch.randint(20, (5,)), level=level, emit=emit, low=["linear"])
    assert model.table.weight.grad.is_sparse


# -- data ------------------------------------------------------------------------------------------


class Averaged(nn.Module):
    """A layer that keeps an average of its results, and counts its calls, through `.data`."""

    def __init__(self, write: "Callable[[Averaged, torch.Tensor], object]", size: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.write = nn.Linear(16, 16), write
        self.register_buffer("average", torch.linspace(0, 1, size))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.write(self, h.detach().square().mean())
        return self.layer(h) * self.average.mean()


def assigned(m: Averaged, mean: torch.Tensor) -> None:
    m.average.data = m.average * 0.5 + mean
    m.calls.data = m.calls + 1


def in_parts(m: Averaged, mean: torch.Tensor) -> None:
    m.average.data[0] = mean
    m.average.data[1:].mul_(0.5).add_(1)


WRITES: dict[str, Callable[[Averaged, torch.Tensor], object]] = {
    "lerp_": lambda m, mean: m.average.data.lerp_(mean, 0.5),
    "add_": lambda m, mean: m.average.data.add_(mean),
    "mul_ and add_": lambda m, mean: m.average.data.mul_(0.9).add_(mean, alpha=0.1),
    "copy_": lambda m, mean: m.average.data.copy_(m.average.data * 0.5 + mean.data),
    "an integer's add_": lambda m, mean: m.calls.data.add_(1),
    "in parts": in_parts,
    "assigned": assigned,
}


@pytest.mark.slow_rows("a matrix of trainings against FP64")
@SETTINGS
@pytest.mark.parametrize("scale", [1024.0, "dynamic"])  # dynamic: the first backward searches
@pytest.mark.parametrize("name", WRITES)
def test_buffers_are_those_of_eager(name: str, scale: object, level: str, emit: str) -> None:
    options = {"level": level, "emit": emit, "loss_scale": scale}
    check(Averaged(WRITES[name]), leaf(4, 16), low=["linear"], steps=3, **options)


def test_a_large_buffer() -> None:
    check(Averaged(WRITES["lerp_"], 1 << 20), leaf(4, 16), low=["linear"], steps=3)


@LEVELS
@pytest.mark.parametrize("name", ["lerp_", "an integer's add_", "assigned"])
def test_in_a_whole_step(name: str, level: str) -> None:
    plain = Averaged(WRITES[name])
    model = copy.deepcopy(plain)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)

    @mpcompile(level=level, dtype=torch.float16, emit="aot_eager", strict=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(3):
        x = torch.randn(4, 16)
        step(x)
        plain(x).square().mean().backward()
        reference.step()
        reference.zero_grad()
    for what, wanted in plain.state_dict().items():
        assert_near(model.state_dict()[what], wanted, what, 1e-2)
    assert any(n.precision == "LOW" for plan in compiled_plans(step) for n in plan.nodes)


@torch._dynamo.allow_in_graph
def hidden(x: torch.Tensor) -> torch.Tensor:
    return x.data * 2


def test_what_the_tracer_cannot_see_is_left_in_fp32() -> None:
    reason = fallback_reason(lambda x, w: hidden(x) @ w, torch.randn(4, 8), leaf(8, 8))
    assert "unseen by the tracer" in reason


# -- left in FP32 ----------------------------------------------------------------------------------


def test_tensor_subclass_is_left_in_fp32() -> None:

    def program(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    pair = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    fast = mpcompile(program, dtype=torch.float16, emit="eager")
    with pytest.warns(match="left a graph in FP32: an input is a tensor subclass") as caught:
        out = fast(pair)
    assert len(caught) == 1
    assert torch.equal(out.a, pair.a @ pair.a)
    strict = mpcompile(program, dtype=torch.float16, emit="eager", strict=True)
    with pytest.raises(Exception, match=r"tensor subclass \(TwoTensor\).*Without strict=True"):
        strict(pair)


def test_fallback_keeps_an_ambient_autocast() -> None:
    """Compiled unchanged, as torch.compile would have, where mpcompile is only its backend."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    options = {"dtype": torch.float16, "emit": "aot_eager"}
    fast = torch.compile(program, backend="mpcompile", options=options)
    pair = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(match="a tensor subclass"):
        out = fast(pair)
    assert out.a.dtype is torch.bfloat16


# -- the zoo ---------------------------------------------------------------------------------------


ZOO = {**HUGGING_FACE, **TIMM}


@pytest.mark.sweep("every model of the zoo")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ZOO)
def test_products_are_low(name: str, level: str) -> None:
    assert wide_products(ZOO[name], level) == {}


def wide_products(entry: Entry, level: str) -> dict[str, int]:
    """How many products are FP32, by reason."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mpcompile(entry.build().train(), dtype=torch.bfloat16, level=level, emit="eager")
        entry.loss(model, entry.draw(torch.Generator().manual_seed(0))).backward()
    found: Counter[str] = Counter()
    for plan in compiled_plans(model):
        products = {op.name for op in plan.tensor_cores.ops}
        wide = [n for n in plan.nodes if n.name in products and n.precision != "LOW"]
        found.update(node.reason for node in wide)
        found.update([plan.left] if plan.left else [])
    return dict(found)
