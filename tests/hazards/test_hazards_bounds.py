"""Bounds and offsets near 1 that come as tensors, buffers or numbers, before a logarithm: the
gradients follow FP64's. A value that was rounded to 1 would lie beyond each bound.
"""

import copy
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import LEVELS
from torch import nn

from mpcompile import mpcompile

Bound = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
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
@LEVELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    "emit", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow("Inductor"))]
)
@pytest.mark.parametrize("named", BOUNDS)
def test_its_gradients_follow_fp64(named: str, emit: str, dtype: torch.dtype, level: str) -> None:
    # In one draw of several a probability lies so near the bound that the products' own rounding
    # puts it on the other side, at any level.
    assert statistics.median(off(named, emit, dtype, level, seed) for seed in range(3)) < 0.02


def off(named: str, emit: str, dtype: torch.dtype, level: str, seed: int) -> float:
    torch.manual_seed(seed)
    net, exact = Net(BOUNDS[named]), Net(BOUNDS[named])
    exact.load_state_dict(net.state_dict())
    x, t = 2 * torch.randn(32, 16), (torch.rand(32, 8) > 0.5).float()
    exact.double()(x.double(), t.double()).backward()
    mpcompile(net, dtype=dtype, level=level, emit=emit)(x, t).backward()
    wanted = exact.a.weight.grad
    return float((net.a.weight.grad.double() - wanted).norm() / wanted.norm())


STEEP: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "acos": lambda p: torch.minimum(p, torch.tensor(0.9999, dtype=p.dtype)).acos(),
    "atanh": lambda p: torch.minimum(p, torch.tensor(0.9999, dtype=p.dtype)).atanh(),
    "logit": lambda p: torch.minimum(p, torch.tensor(0.9999, dtype=p.dtype)).logit(),
    "erfinv": lambda p: torch.minimum(p, torch.tensor(0.9999, dtype=p.dtype)).erfinv(),
    "log1p": lambda p: torch.log1p(-torch.minimum(p, torch.tensor(0.9999, dtype=p.dtype))),
    "sqrt": lambda p: (1.0001 - p).sqrt(),
    "log of a difference": lambda p: (p - torch.tensor(1.0001, dtype=p.dtype)).neg().log(),
    "a product of differences": lambda p: ((1.0001 - p) * (1 + p)).sqrt(),
}


@LEVELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("named", STEEP)
def test_before_other_steep_operators(named: str, dtype: torch.dtype, level: str) -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> Any:
            return STEEP[named]((6 * self.a(x)).sigmoid()).mean()

    torch.manual_seed(0)
    net, x = Steep(), torch.randn(32, 16)
    exact = copy.deepcopy(net).double()
    exact(x.double()).backward()
    mpcompile(net, dtype=dtype, level=level, emit="aot_eager")(x).backward()
    wanted = exact.a.weight.grad
    assert (net.a.weight.grad.double() - wanted).norm() < 0.02 * wanted.norm()
