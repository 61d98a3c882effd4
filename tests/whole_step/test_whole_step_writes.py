"""Whole training steps that write to parameters, averages and buffers besides the optimizer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from whole_steps import BOTH, SETTINGS, Run, Setting, agree, agree_left, batches

pytestmark = pytest.mark.slow("compiles whole steps of several kinds, against FP64")

Step = Callable[..., Any]
Write = Callable[[nn.Module], Any]


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.05, 0.05)


def clamp_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)


def copy_(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * 0.5)


def decay(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def writing(write: Write, when: str) -> Callable[[Run], Step]:
    def program(run: Run) -> Step:
        model, optimizer, loss_of = run.classifier()

        def step(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
            for _ in range(2 if when == "between" else 1):
                if when == "before":
                    write(model)
                loss = loss_of(x, y, f)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if when != "before":
                    write(model)
            return loss.detach()

        return step

    return program


WRITES = pytest.mark.parametrize("write", [clamp, clamp_data, copy_, decay])


@pytest.mark.sampled(3)
@BOTH
@WRITES
@pytest.mark.parametrize("when", ["after", "before", "between"])
def test_parameters_are_written(setting: Setting, write: Write, when: str) -> None:
    """After the update, as the weights of a critic are clamped: the next forward reads what was
    written. Before a forward, at O2, that would have to read a copy that is cast in the same graph.
    """
    if setting.level == "O1" or when == "after":
        agree(writing(write, when), batches(4), setting)
    else:
        agree_left(writing(write, when), batches(4), setting, "")


@BOTH
def test_two_steps_in_one_function(setting: Setting) -> None:
    nothing = writing(lambda model: None, "between")
    assert agree(nothing, batches(4, factors={2: 1e30}), setting).scale.skipped_steps == 2


@SETTINGS
@pytest.mark.parametrize("how", ["lerp", "foreach", "swa"])
def test_an_average_of_the_weights(setting: Setting, how: str) -> None:
    def program(run: Run) -> Step:
        model, optimizer, loss_of = run.classifier()
        average = run.model(copy.deepcopy(model).requires_grad_(False))

        @torch.no_grad()
        def follow() -> None:
            if how == "foreach":
                averages = list(average.parameters())
                torch._foreach_mul_(averages, 0.9)
                torch._foreach_add_(averages, list(model.parameters()), alpha=0.1)
            else:
                for p, q in zip(average.parameters(), model.parameters(), strict=True):
                    if how == "lerp":
                        p.lerp_(q, 0.1)
                    else:
                        p.mul_(0.9).add_(q.detach(), alpha=0.1)

        return run.usual(loss_of, optimizer, then=follow)

    bad = {2: 1e30} if setting.dtype is torch.float16 else {}
    agree(program, batches(4, factors=bad), setting)


class Normed(nn.Module):
    """A classifier with batch norm and a counter of its own."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 32), nn.BatchNorm1d(32)
        self.drop, self.last = nn.Dropout(p), nn.Linear(32, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def of_normed(p: float) -> Callable[[Run], Step]:
    def program(run: Run) -> Step:
        model = run.model(Normed(p))
        optimizer = run.sgd(model.parameters())
        run.before[3] = model.eval
        run.before[4] = model.train
        return run.usual(run.loss_of(model), optimizer)

    return program


@SETTINGS
def test_buffers_and_the_mode(setting: Setting) -> None:
    run = agree(of_normed(0.0), batches(6), setting, compiled=2)
    (model,) = run.models
    assert model.seen == 40
    assert model.norm.num_batches_tracked == 5


@BOTH
def test_dropout_as_in_pieces(setting: Setting) -> None:
    agree(of_normed(0.5), batches(5), setting, compiled=2)


@BOTH
def test_dropout_differs_from_step_to_step(setting: Setting) -> None:
    run = Run(True, setting)
    model = run.model(Normed(0.5))
    still = torch.optim.SGD(model.parameters(), lr=0.0)

    step = run.step(run.usual(run.loss_of(model), still))
    (batch,) = batches(1)
    losses = torch.stack([step(*batch) for _ in range(4)])
    assert step.left is None
    assert len(losses.unique()) == 4
