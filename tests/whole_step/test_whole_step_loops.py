"""Whole training steps: accumulation, schedules, clipping, and when gradients are set to None."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from whole_steps import BOTH, O1_MP, O2, SETTINGS, Run, Setting, agree, batches

pytestmark = [
    pytest.mark.inside,
    pytest.mark.slow("compiles whole steps of several kinds, against FP64"),
]

Step = Callable[..., Any]


def rounding(setting: Setting) -> dict[str, float]:
    """Tolerances for sums of gradients: in pieces at O2, p.grad and its sums have the low dtype."""
    if setting.level == "O1":
        return {}
    low = torch.finfo(setting.dtype).eps
    return {"rtol": 4 * low, "atol": low / 4}


@SETTINGS
@pytest.mark.parametrize("bad", [None, 1], ids=["", "overflow"])
def test_micro_batches_in_a_loop(setting: Setting, bad: int | None) -> None:
    def program(run: Run) -> Step:
        _, optimizer, loss_of = run.classifier()

        def step(x: torch.Tensor, y: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for i in range(3):
                loss = loss_of(x[i], y[i], factors[i]) / 3
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step

    if bad is not None and setting.dtype is torch.bfloat16:
        pytest.skip("BF16 skips nothing")
    calls = []
    for i, (x, y, _) in enumerate(batches(4, rows=24)):
        factors = torch.ones(3)
        if bad is not None and i == 2:
            factors[bad] = 1e30
        calls.append((x.view(3, 8, 16), y.view(3, 8), factors))
    run = agree(program, calls, setting, **rounding(setting))
    assert run.scale.skipped_steps == (bad is not None)


def accumulating(run: Run) -> Step:
    _, optimizer, loss_of = run.classifier()

    def step(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor, last: bool) -> torch.Tensor:
        loss = loss_of(x, y, f) / 2
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


@SETTINGS
@pytest.mark.parametrize("count", [2, 3])
def test_gradients_are_left_between_calls(setting: Setting, count: int) -> None:
    calls = [(*batch, i % count == count - 1) for i, batch in enumerate(batches(6))]
    agree(accumulating, calls, setting, compiled=count, **rounding(setting))


@BOTH
@pytest.mark.parametrize("bad", [2, 3])
def test_one_of_several_calls_overflows(setting: Setting, bad: int) -> None:
    calls = [(*b, bool(i % 2)) for i, b in enumerate(batches(8, factors={bad: 1e30}))]
    run = agree(accumulating, calls, setting, compiled=2, **rounding(setting))
    assert run.scale.skipped_steps == 1


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.5**e),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "onecycle-lr": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=True),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.sampled(5)
@BOTH
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("make", [Run.adamw, Run.sgd])
def test_a_schedule_outside(setting: Setting, name: str, make: Any) -> None:
    def program(run: Run) -> Step:
        _, optimizer, loss_of = run.classifier(make)
        scheduler = SCHEDULERS[name](optimizer)
        run.before.update(dict.fromkeys(range(1, 6), scheduler.step))
        return run.usual(loss_of, optimizer)

    moves_momentum = name in ("onecycle", "cyclic")
    # AdamW divides tiny gradients, which are rounded in FP16, by as tiny roots: each of its updates
    # is up to lr = 0.1 all the same.
    atol = 1e-4 if make is Run.adamw else 1e-5
    agree(program, batches(6), setting, compiled=2 if moves_momentum else 1, atol=atol)


@SETTINGS
def test_a_tensor_is_the_learning_rate(setting: Setting) -> None:
    def program(run: Run) -> Step:
        lr = torch.tensor(1e-2)
        _, optimizer, loss_of = run.classifier(
            lambda run, p: run.optimizer(torch.optim.AdamW(p, lr=lr))
        )
        run.before[2] = lambda: optimizer.param_groups[0]["lr"].mul_(0.1)
        run.before[3] = lambda: optimizer.param_groups[0].update(lr=torch.tensor(1e-3))
        return run.usual(loss_of, optimizer)

    agree(program, batches(5), setting)


@pytest.mark.sampled(5)
@BOTH
@pytest.mark.parametrize("how", ["norm", "norm-inf", "value"])
@pytest.mark.parametrize("of", ["model", "list"])
def test_clipping_in_the_function(setting: Setting, how: str, of: str) -> None:
    def program(run: Run) -> Step:
        model, optimizer, loss_of = run.classifier()
        listed = list(model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> Any:
            loss = loss_of(x, y, f)
            loss.backward()
            parameters = listed if of == "list" else model.parameters()
            norm = None
            if how == "value":
                nn.utils.clip_grad_value_(parameters, 0.01)
            else:
                p = 2.0 if how == "norm" else float("inf")
                norm = nn.utils.clip_grad_norm_(parameters, 0.1, p)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), norm

        return step

    if setting is O2:  # in pieces, p.grad is scaled: it can't be clipped by hand there
        setting = O1_MP
    run = agree(program, batches(4, factors={2: 1e30}), setting)
    assert run.scale.skipped_steps == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clipping_by_the_optimizer(level: str, dtype: torch.dtype) -> None:
    def program(run: Run) -> Step:
        _, optimizer, loss_of = run.classifier(max_grad_norm=0.1)
        return run.usual(loss_of, optimizer)

    bad = {2: 1e30} if dtype is torch.float16 else {}
    run = agree(program, batches(4, factors=bad), Setting(level, dtype, True))
    assert run.optimizers[0].grad_norm > 0.1


@pytest.mark.sampled(3)
@SETTINGS
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("where", ["start", "end"])
@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_zero_grad(setting: Setting, to_none: bool, where: str, by: str) -> None:
    def program(run: Run) -> Step:
        model, optimizer, loss_of = run.classifier(Run.adamw)
        zeroed = optimizer if by == "optimizer" else model

        def step(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
            if where == "start":
                zeroed.zero_grad(set_to_none=to_none)
            loss = loss_of(x, y, f)
            loss.backward()
            optimizer.step()
            if where == "end":
                zeroed.zero_grad(set_to_none=to_none)
            return loss.detach()

        return step

    # Its own zero_grad doesn't look at what it throws away, so nothing differs in the second call.
    compiled = 1 if to_none and (where == "end" or by == "optimizer") else 2
    agree(program, batches(4), setting, compiled=compiled)


@BOTH
def test_gradients_are_returned(setting: Setting) -> None:
    """What `p.grad` is where it is read, not what it was before the call, nor afterwards."""

    def program(run: Run) -> Step:
        model, optimizer, loss_of = run.classifier()

        def step(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> Any:
            loss_of(x, y, f).backward()
            gradients = [p.grad for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            return gradients, [p.grad for p in model.parameters()], None

        return step

    if setting is O2:  # in pieces, p.grad is scaled
        setting = O1_MP
    agree(program, batches(3), setting)
