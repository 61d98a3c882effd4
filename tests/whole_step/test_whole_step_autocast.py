"""Autocast regions of the step's own: the rewritten forward and its backward run as planned, and a
disabled region keeps what the program says.
"""

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from whole_steps import traces

from mpcompile import MPOptimizer, Policy, mpcompile
from mpcompile.devices import autocast

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BF16 = torch.bfloat16
FIRST_FP32 = Policy(modules={"0": "fp32"})


class Loop:
    """Two layers, SGD, and a training step with a region somewhere."""

    def __init__(self, enabled: bool = True) -> None:
        torch.manual_seed(0)
        self.enabled = enabled
        self.model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        plain = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.optimizer = MPOptimizer(plain, emit="eager")

    def region(self) -> torch.autocast:
        return torch.autocast("cpu", BF16, enabled=self.enabled)

    def update(self, loss: torch.Tensor) -> torch.Tensor:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def without(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return self.update(loss)

    def around_the_forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.region():
            loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return self.update(loss)

    def around_the_model(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.region():
            scores = self.model(x)
        loss = F.cross_entropy(scores.float(), y)
        loss.backward()
        return self.update(loss)

    def around_all(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.region():
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            return self.update(loss)

    def two_regions(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.region():
            scores = self.model(x)
        with self.region():
            loss = F.cross_entropy(scores, y)
        loss.backward()
        return self.update(loss)

    def around_the_head(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.model[1](self.model[0](x))
        with self.region():
            loss = F.cross_entropy(self.model[2](hidden), y)
        loss.backward()
        return self.update(loss)


def _run(loop: Loop, step: Step) -> list[torch.Tensor]:
    """Losses of three steps, and the weights after them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 16, generator=generator)
    y = torch.randint(4, (8,), generator=generator)
    losses = [step(x, y) for _ in range(3)]
    return [*losses, *(p.detach() for p in loop.model.parameters())]


def _compiled(
    name: str, policy: Policy, level: str = "O1", *, enabled: bool = True
) -> list[torch.Tensor]:
    loop = Loop(enabled)
    step = mpcompile(getattr(loop, name), dtype=BF16, level=level, emit="eager", policy=policy)
    with traces() as found:
        results = _run(loop, step)
    assert len(found) == 1  # one graph holds the step
    return results


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize(
    "name", ["around_the_forward", "around_the_model", "around_all", "two_regions"]
)
def test_a_region_changes_no_dtype_that_was_planned(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "mpcompile")
    autocast.say_autocast.cache_clear()  # it is said once in a process
    mixed = _compiled("without", FIRST_FP32)
    low, full = (_compiled("without", Policy(modules=pin)) for pin in ({}, {".*": "fp32"}))
    # What the policy pins shows in the result, so that equal results say something.
    assert not any(torch.equal(mixed[-1], other[-1]) for other in (low, full))
    found = _compiled(name, FIRST_FP32)
    torch.testing.assert_close(found, mixed, rtol=0, atol=0)
    assert not caplog.records  # nobody is told that the region has no effect


@pytest.mark.parametrize("name", ["around_the_forward", "around_all"])
def test_a_disabled_region_is_fp32(name: str) -> None:
    loop = Loop()
    found = _compiled(name, Policy(), enabled=False)
    torch.testing.assert_close(found, _run(loop, loop.without))


def test_a_region_that_begins_amid_the_forward() -> None:
    head_fp32 = _compiled("without", Policy(modules={"2": "fp32"}))
    found = _compiled("around_the_head", Policy(), enabled=False)
    torch.testing.assert_close(found, head_fp32, rtol=0, atol=0)


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize("name", ["around_the_forward", "around_all", "two_regions"])
def test_at_o0_a_region_is_the_users(name: str) -> None:
    loop = Loop()
    found = _compiled(name, Policy(), level="O0")
    torch.testing.assert_close(found, _run(loop, getattr(loop, name)), rtol=0, atol=0)
    assert not torch.equal(found[-1], _compiled("without", Policy(), level="O0")[-1])
