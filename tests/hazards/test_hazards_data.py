"""Hazards around `tensor.data`: reads and writes that autograd doesn't see, as the averages of a
codebook make them.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from compare import LEVELS, SETTINGS, assert_near, check, fallback_reason, leaf
from torch import nn

from mpcompile import MPOptimizer, compiled_plans, mpcompile


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
