"""Operators that are tame forward and leave FP16's range within their backward, in programs whose
hidden values are tiny or large: no step is skipped, and gradients follow FP64's.

`tests/rules/test_op_db.py` asks the same of torch's whole operator table (a sweep).
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import LEVELS
from torch import nn

from mpcompile import loss_scale_of, mpcompile

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
@pytest.mark.parametrize(
    "emit", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow("Inductor"))]
)
@pytest.mark.parametrize(("name", "size", "inner"), CASES, ids=[name for name, _, _ in CASES])
def test_its_gradients_stay_in_range(
    name: str, size: float, inner: Inner, emit: str, level: str
) -> None:
    torch.manual_seed(0)
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
