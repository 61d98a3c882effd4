"""MPOptimizer and settings of param groups, which change between steps as in plain PyTorch."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from twins import Twins

from mpcompile import MPOptimizer

pytestmark = pytest.mark.inside

momentum = functools.partial(SGD, lr=0.1, momentum=0.9)
decayed = functools.partial(AdamW, lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: StepLR(o, 2, 0.5),
        lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: ReduceLROnPlateau(o, patience=0),
    ],
    ids=["StepLR", "LambdaLR", "ReduceLROnPlateau"],
)
@pytest.mark.parametrize("make", [momentum, decayed])
def test_a_schedule_of_the_learning_rate_compiles_once(
    make: Any, schedule: Callable[[Optimizer], Any]
) -> None:
    twins = Twins(make)
    schedulers = [schedule(o) for o in twins.both]
    for _ in range(6):
        twins.step()
        for scheduler in schedulers:
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
    assert twins.optimizer.param_groups[0]["lr"] != 0.1
    twins.agree()
    assert twins.optimizer.compilations == 1


@pytest.mark.parametrize("make", [momentum, decayed])
def test_one_cycle_moves_momentum_too(make: Any) -> None:
    twins = Twins(make)
    schedulers = [OneCycleLR(o, max_lr=0.2, total_steps=5) for o in twins.both]
    for _ in range(4):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    twins.agree()
    assert twins.optimizer.compilations <= 2


def test_a_scheduler_over_the_inner_optimizer_works_too() -> None:
    """And does not warn that nobody stepped."""
    parameter = nn.Parameter(torch.zeros(2))
    inner = SGD([parameter], lr=1.0)
    scheduler = StepLR(inner, 1, 0.5)
    optimizer = MPOptimizer(inner, emit="eager")
    for expected in (-1.0, -1.5):
        parameter.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
        assert parameter.tolist() == [expected, expected]


@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_a_tensor_for_a_learning_rate(cls: type[Optimizer]) -> None:
    twins = Twins(lambda p: cls(p, lr=torch.tensor(0.1)))  # type: ignore[call-arg]
    for _ in range(3):
        twins.step()
        for optimizer in twins.both:
            optimizer.param_groups[0]["lr"].mul_(0.5)
    twins.agree()
    assert twins.optimizer.compilations == 1


@pytest.mark.parametrize(
    ("make", "setting", "value"),
    [
        (momentum, "weight_decay", 0.3),
        (momentum, "momentum", 0.5),
        (momentum, "nesterov", True),
        (momentum, "maximize", True),
        (decayed, "betas", (0.5, 0.6)),
        (decayed, "eps", 0.1),
        (functools.partial(SGD, lr=0.1), "momentum", 0.9),
    ],
)
def test_a_setting_changed_between_steps_is_honoured(make: Any, setting: str, value: Any) -> None:
    twins = Twins(make)
    for step in range(5):
        if step == 2:
            for optimizer in twins.both:
                optimizer.param_groups[0][setting] = value
        twins.step()
    twins.agree()
    assert twins.optimizer.compilations == 2


@pytest.mark.slow("trains with several optimizers")
@pytest.mark.parametrize("emit", ["eager", "inductor"])
def test_a_warmup_starts_from_zero(emit: str) -> None:
    """Where a step divides by the learning rate, elements without a gradient would become nan."""
    twins = Twins(decayed, [torch.randn(4, 3)], emit=emit)
    schedulers = [LambdaLR(o, lambda step: step / 10) for o in twins.both]
    for _ in range(4):
        gradient = torch.randn(4, 3)
        gradient[1] = 0  # a row of an embedding that no token asked for
        twins.step([gradient])
        for scheduler in schedulers:
            scheduler.step()
    twins.agree()


def test_a_learning_rate_that_was_a_tensor_for_one_step() -> None:
    p = nn.Parameter(torch.zeros(()))
    optimizer = MPOptimizer(SGD([p], lr=1.0), emit="eager")
    for rate in (1.0, torch.tensor(2.0), 1.0):
        optimizer.param_groups[0]["lr"] = rate
        p.grad = torch.ones(())
        optimizer.step()
    assert p.item() == -4.0


def test_param_groups_with_settings_of_their_own() -> None:
    def make(p: Any) -> Optimizer:
        return AdamW([{"params": p[:1], "lr": 0.3, "weight_decay": 0.0, "betas": (0.5, 0.9)},
                      {"params": p[1:2], "amsgrad": True}, {"params": p[2:], "maximize": True}],
                     lr=0.1)  # fmt: skip

    twins = Twins(make)
    twins.train()


def test_a_param_group_added_between_steps() -> None:
    twins = Twins(lambda p: momentum(p[:2]))
    for step in range(5):
        if step == 2:
            for optimizer, params in zip(twins.both, (twins.theirs, twins.mine), strict=True):
                optimizer.add_param_group({"params": params[2:], "lr": 0.5})
        twins.step()
    twins.agree()
    assert twins.optimizer.compilations == 2
    assert len(twins.optimizer.param_groups) == 2


def test_a_param_group_removed_between_steps() -> None:
    twins = Twins(lambda p: momentum([{"params": p[:1]}, {"params": p[1:]}]))
    for step in range(4):
        if step == 2:
            for optimizer in twins.both:
                optimizer.param_groups = optimizer.param_groups[1:]
        twins.step()
    twins.agree()


def test_state_thrown_away_starts_again() -> None:
    twins = Twins(decayed)
    for step in range(4):
        if step == 2:
            for optimizer in twins.both:
                optimizer.state = type(optimizer.state)(dict)
        twins.step()
    twins.agree()
    assert twins.optimizer.state[twins.mine[0]]["step"] == 2


def test_a_hook_that_is_registered_compiles_nothing_again() -> None:
    """Hooks run around the step and are no part of it."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = MPOptimizer(torch.optim.SGD([p], lr=0.5), emit="eager")
    called: list[bool] = []
    for _ in range(2):
        p.grad = torch.ones(4)
        optimizer.step()
        optimizer.inner.register_step_post_hook(lambda *_: called.append(True))
    p.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.compilations == 1
    assert called
    torch.testing.assert_close(p.detach(), torch.full((4,), -0.5))
