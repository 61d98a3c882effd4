"""Ranges: masks whose masked stays masked, bounds near 1 before a logarithm, and values that FP16
can't hold.
"""

import copy
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import COMBINED, EMITS, LEVELS, check, leaf
from module_of import module_of
from torch import nn

from mpcompile import loss_scale_of, mpcompile

# -- masks -----------------------------------------------------------------------------------------


def mask_with_a_full_row() -> torch.Tensor:
    """True where attention is allowed; nobody may look anywhere from row 2."""
    mask = torch.ones(8, 8).tril().bool()
    mask[2] = False
    return mask


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-1, -2)


def lowest(x: torch.Tensor) -> float:
    return torch.finfo(x.dtype).min


def added_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's models write it: a float mask, cast to the scores' dtype."""
    given = scores(q, k) / 4
    bias = (1.0 - mask.to(given.dtype)) * lowest(given)
    weights = F.softmax(given + bias, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, 0.0) @ k


attend = F.scaled_dot_product_attention
MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "masked_fill_with_the_minimum": lambda q, k, mask: (
        (s := scores(q, k)).masked_fill(~mask, lowest(s)).softmax(-1) @ k
    ),
    "masked_fill_in_place": lambda q, k, mask: (
        scores(q, k).masked_fill_(~mask, -1e9).softmax(-1) @ k
    ),
    "added_mask": added_mask,
    "where_mask": lambda q, k, mask: (
        torch.where(mask, scores(q, k), torch.tensor(-1e30)).softmax(-1) @ k
    ),
    "baddbmm_mask": lambda q, k, mask: (
        torch.baddbmm(
            torch.where(mask, 0.0, lowest(q)).expand(2, 8, 8), q, k.transpose(-1, -2), alpha=0.25
        ).softmax(-1)
        @ k
    ),
    "sdpa_float_mask": lambda q, k, mask: attend(
        q, k, k, attn_mask=torch.where(mask, 0.0, lowest(q))
    ),
    "sdpa_minus_billion": lambda q, k, mask: attend(
        q, k, k, attn_mask=torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -1e9)
    ),
    "sdpa_bool_mask": lambda q, k, mask: attend(q, k, k, attn_mask=mask),
}


@LEVELS
@pytest.mark.parametrize("case", MASKS)
def test_masks(case: str, level: str) -> None:
    """The row masked as a whole is finite, as in FP32; what it holds means nothing to anybody."""

    def rows(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> Any:
        out = MASKS[case](q, k, mask)
        return out.masked_fill(~mask.any(-1, keepdim=True), 0.0), out.isfinite().all()

    check(rows, leaf(2, 8, 16), leaf(2, 8, 16), mask_with_a_full_row(), level=level)


@LEVELS
@pytest.mark.parametrize("floor", [-1e9, torch.finfo(torch.float32).min, float("-inf")])
def test_float_mask_that_comes_from_outside(floor: float, level: str) -> None:
    """Masked keys stay masked: what they hold must not reach the output."""
    mask = torch.ones(8, 8).tril().bool()
    bias = torch.zeros(8, 8).masked_fill(~mask, floor)
    result = check(
        F.scaled_dot_product_attention, leaf(2, 8, 16), leaf(2, 8, 16), leaf(2, 8, 16), bias,
        level=level, low=["scaled_dot_product_attention"],
    )  # fmt: skip
    q, k = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    other = k.clone()
    other[:, -1] = 100.0  # only the last row may look there
    a, b = (result.model(q, keys, keys, bias) for keys in (k, other))
    assert torch.equal(a[:, :-1], b[:, :-1])


@LEVELS
def test_additive_mask_from_outside_on_scores(level: str) -> None:
    def program(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ k

    bias = torch.zeros(8, 8).masked_fill(~mask_with_a_full_row(), torch.finfo(torch.float32).min)
    check(program, leaf(2, 8, 16), leaf(2, 8, 16), bias, level=level, low=["matmul"])


@LEVELS
def test_causal_attention(level: str) -> None:
    def program(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    check(
        program, leaf(2, 8, 16), leaf(2, 8, 16), level=level, low=["scaled_dot_product_attention"]
    )


# -- ranges ----------------------------------------------------------------------------------------


Inner = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

TINY: dict[str, Inner] = {
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "the length": lambda a, b: (a.square() + b.square() + 1e-12).sqrt(),
    "a ratio": lambda a, b: a / (b.abs() + 1e-4),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b.abs() + 1e-3, value=1e-3),
    "a Gaussian": lambda a, b: (a - b) ** 2 / (b.abs() + 1e-4),
    "a unit vector": lambda a, b: nn.functional.normalize(a, dim=-1) + b,
    "cosine": lambda a, b: nn.functional.cosine_similarity(a, b, dim=-1)[:, None] + b,
    "a product": lambda a, b: torch.zeros_like(a).scatter_reduce(
        1, torch.arange(16).expand_as(a) // 2, a, "prod", include_self=False
    ),
    "asinh": lambda a, b: torch.asinh(a * 1e3) + b,
    "log1p": lambda a, b: torch.log1p(a.abs()) + b,
    "rsqrt": lambda a, b: a * torch.rsqrt(b * b + 1e-6),
}
LARGE: dict[str, Inner] = {
    "atan": lambda a, b: torch.atan(a) + torch.atan(b),
    "x * x": lambda a, b: (a * a + b * b).add(1).log(),
    "x.mul_(x)": lambda a, b: (a.clone().mul_(a) + b * b).add(1).log(),
    "local response": lambda a, b: nn.functional.local_response_norm(a[:, :, None], 2)[..., 0] + b,
    "softsign": lambda a, b: nn.functional.softsign(a) + nn.functional.softsign(b),
    "a cubic": lambda a, b: (a.pow(3) * 1e-6).tanh() + b * 1e-3,
    "logcosh": lambda a, b: nn.functional.softplus(-2 * a.abs()) + a.abs() + b,
    "a root": lambda a, b: (a.abs() + 1).sqrt() + b.abs().add(1).rsqrt(),
}


class Net(nn.Module):
    """Two linear layers; what is between them is `size` in magnitude."""

    def __init__(self, inner: Inner, size: float) -> None:
        super().__init__()
        self.inner, self.first, self.last = inner, nn.Linear(8, 32, bias=False), nn.Linear(16, 4)
        self.first.weight.data.mul_(size / 0.4)

    def forward(self, x: torch.Tensor) -> Any:
        a, b = self.first(x).chunk(2, -1)
        return self.last(self.inner(a, b))


def gradients(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    net(x).square().mean().backward()
    return torch.cat([p.grad.double().flatten() for p in net.parameters() if p.grad is not None])


CASES = [
    *((name, 1e-4, inner) for name, inner in TINY.items()),
    *((name, 1e3, inner) for name, inner in LARGE.items()),
]


@LEVELS
@EMITS
@pytest.mark.parametrize(("name", "size", "inner"), CASES, ids=[name for name, _, _ in CASES])
def test_its_gradients_stay_in_range(
    name: str, size: float, inner: Inner, emit: str, level: str
) -> None:
    net, x = Net(inner, size), torch.randn(64, 8)
    exact = gradients(copy.deepcopy(net).double(), x.double())
    model = mpcompile(net, dtype=torch.float16, level=level, emit=emit)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        found = gradients(model, x)
        optimizer.step()
    scale = loss_scale_of(model)
    assert scale.skipped_steps == 0
    assert (found - exact).norm() < 0.05 * exact.norm()


# -- bounds ----------------------------------------------------------------------------------------


Bound = Callable[[Any, torch.Tensor], torch.Tensor]


class Bounded(nn.Module):
    """A cross entropy of probabilities, written by hand."""

    def __init__(self, bound: Bound) -> None:
        super().__init__()
        self.a, self.b, self.bound = nn.Linear(16, 16), nn.Linear(16, 8), bound
        for name, number in {"high": 0.9999, "low": 1e-4, "near": 0.999}.items():
            self.register_buffer(name, torch.tensor(number))
        self.register_buffer("row", torch.full((8,), 0.9999))

    def tensor(self, number: Any) -> torch.Tensor:
        return torch.tensor(number, dtype=self.high.dtype)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        p = self.bound(self, (12 * self.b(self.a(x).relu())).sigmoid())
        return -((1 - p).log() * (1 - t)).mean() - (p.clamp(min=1e-4).log() * t).mean()


BOUNDS: dict[str, Bound] = {
    "minimum": lambda m, p: torch.minimum(p, m.tensor(0.9999)),
    "fmin": lambda m, p: torch.fmin(p, m.tensor(0.9999)),
    "torch.min": lambda m, p: torch.min(p, m.tensor(0.9999)),
    "clamp": lambda m, p: p.clamp(m.tensor(1e-4), m.tensor(0.9999)),
    "clamp_max": lambda m, p: torch.clamp_max(p, m.tensor(0.9999)),
    "clip": lambda m, p: torch.clip(p, m.tensor(1e-4), m.tensor(0.9999)),
    "a buffer": lambda m, p: torch.minimum(p, m.high),
    "buffers": lambda m, p: p.clamp(m.low, m.high),
    "a row of a buffer": lambda m, p: torch.minimum(p, m.row),
    "a row": lambda m, p: torch.minimum(p, m.tensor([0.9999] * 8)),
    "full_like": lambda m, p: torch.minimum(p, torch.full_like(p, 0.9999)),
    "new_tensor": lambda m, p: torch.minimum(p, p.new_tensor(0.9999)),
    "new_full": lambda m, p: torch.minimum(p, p.new_full((8,), 0.9999)),
    "as_tensor": lambda m, p: torch.minimum(p, torch.as_tensor(0.9999, dtype=p.dtype)),
    "where": lambda m, p: torch.where(p > 0.9999, m.tensor(0.9999), p),
    "where with a buffer": lambda m, p: torch.where(p > m.high, m.high, p),
    "where with a number": lambda m, p: torch.where(p > 0.9999, 0.9999, p),
    "masked_fill": lambda m, p: p.masked_fill(p > 0.9999, 0.9999),
    "arithmetic": lambda m, p: torch.minimum(p, 1 - m.tensor(1e-4)),
    "arithmetic of a buffer": lambda m, p: torch.minimum(p, 1 - m.low),
    "ones_like": lambda m, p: torch.minimum(p, torch.ones_like(p) - 1e-4),
    "scaled": lambda m, p: p * m.tensor(0.9998) + m.tensor(1e-4),
    "scaled by a buffer": lambda m, p: p * (1 - 2 * m.low) + m.low,
    "scaled by numbers": lambda m, p: p * 0.9998 + 1e-4,
    "1e-3": lambda m, p: p.clamp(1e-3, 1 - 1e-3),
    "1e-3 in tensors": lambda m, p: p.clamp(m.tensor(1e-3), m.tensor(1 - 1e-3)),
    "0.999 in a buffer": lambda m, p: torch.minimum(p, m.near),
    "1e-2": lambda m, p: p.clamp(1e-2, 1 - 1e-2),
    "hardtanh": lambda m, p: nn.functional.hardtanh(p, 1e-4, 0.9999),
    "nan_to_num": lambda m, p: torch.nan_to_num(p, 0.0).clamp(max=0.9999),
    "the other side": lambda m, p: -torch.maximum(-p, m.tensor(-0.9999)),
    "amin": lambda m, p: torch.stack([p, torch.full_like(p, 0.9999)]).amin(0),
}


@pytest.mark.slow_rows("several programs each", but=8)
@COMBINED
@pytest.mark.parametrize("named", BOUNDS)
def test_its_gradients_follow_fp64(named: str, how: Any) -> None:
    model, found = mpcompile(Bounded(BOUNDS[named]), **how), []
    for seed in range(7):
        torch.manual_seed(seed)
        drawn = Bounded(BOUNDS[named])
        model.load_state_dict(drawn.state_dict())
        model.zero_grad()
        x, t = 2 * torch.randn(32, 16), (torch.rand(32, 8) > 0.5).float()
        drawn.double()(x.double(), t.double()).backward()
        model(x, t).backward()
        wanted = drawn.a.weight.grad
        found.append(float((model.a.weight.grad.double() - wanted).norm() / wanted.norm()))
    # In some draws rounding puts a probability beyond the bound. NaN is not below 1.
    assert statistics.median(off if off < 1 else 1 for off in found) < 0.02


STEEP: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "acos": lambda p: torch.minimum(p, torch.tensor(0.9999, dtype=p.dtype)).acos(),
    "atanh": lambda p: torch.minimum(p, torch.tensor(0.9999, dtype=p.dtype)).atanh(),
    "logit": lambda p: torch.minimum(p, torch.tensor(0.9999, dtype=p.dtype)).logit(),
    "erfinv": lambda p: torch.minimum(p, torch.tensor(0.9999, dtype=p.dtype)).erfinv(),
    "log1p": lambda p: torch.log1p(-torch.minimum(p, torch.tensor(0.9999, dtype=p.dtype))),
    "sqrt": lambda p: (1.0001 - p).sqrt(),
    "log of a difference": lambda p: (p - torch.tensor(1.0001, dtype=p.dtype)).neg().log(),
    "a product of differences": lambda p: ((1.0001 - p) * (1 + p)).sqrt(),
    "odds": lambda p: (lambda q: q / (1 - q))(p.clamp(1e-4, 1 - 1e-4)),
    "a power": lambda p: (1 - p.clamp(max=1 - 1e-4)) ** -0.5,
    "acosh": lambda p: (1 + p.square() / 1024).clamp(min=1 + 1e-4).acosh(),
    "cross entropy": lambda p: F.binary_cross_entropy(
        p.clamp(1e-4, 1 - 1e-4), (torch.arange(16) % 2).to(p.dtype).expand_as(p)
    ),
    "finfo": lambda p: (1 - p.clamp(2.0**-23, 1 - 2.0**-23)).log(),
}


@COMBINED
@pytest.mark.parametrize("named", STEEP)
def test_before_other_steep_operators(named: str, how: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return STEEP[named]((6 * m.a(x)).sigmoid()).mean()

    torch.manual_seed(0)
    net, x = module_of(forward, a=nn.Linear(16, 16)), torch.randn(32, 16)
    exact = copy.deepcopy(net).double()
    exact(x.double()).backward()
    mpcompile(net, **how)(x).backward()
    wanted = exact.a.weight.grad
    assert (net.a.weight.grad.double() - wanted).norm() < 0.02 * wanted.norm()
