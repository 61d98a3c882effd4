"""The loss scale inside the step: moved on the device as on the host, and nobody waits for it."""

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scale_model import RULES, STARTS, STEPS, Model
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from mpcompile import (
    LossScale,
    MPCompileError,
    MPCompileWarning,
    MPOptimizer,
    loss_scale_of,
    mpcompile,
)
from mpcompile.ir import aten
from mpcompile.ir.scale import ScaleRule

INF, NAN = float("inf"), float("nan")


def stepper(scale: LossScale, emit: str = "eager") -> tuple[MPOptimizer, Any]:
    """An optimizer of one number, and its step after a training forward."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = MPOptimizer(SGD([parameter], lr=0.1), loss_scale=scale, emit=emit)

    def step(gradient: float, forward: bool = True) -> None:
        if forward:
            scale.saw_forward()
        parameter.grad = torch.tensor([1.0, gradient])
        optimizer.step()

    return optimizer, step


@pytest.mark.slow("trains with several optimizers")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(RULES, STARTS, STEPS, st.sampled_from([INF, NAN]))
def test_the_device_moves_the_scale_as_the_model_does(
    rule: ScaleRule, start: float, steps: list[tuple[bool, bool]], overflowing: float
) -> None:
    """Exactly, in FP32, INT64 and BOOL."""
    scale = LossScale(rule, start)
    scale.said.floor = scale.said.skips = scale.said.row = True  # that it does is tested elsewhere
    model = Model(rule, start, np.float32)
    optimizer, step = stepper(scale)
    for i, (overflow, first) in enumerate(steps):
        first = first or i == 0
        step(overflowing if overflow else 1.0, forward=first)
        assert bool(optimizer.skipped) == overflow
        model.step(overflow, first)
        assert dataclasses.asdict(scale.state) == model.numbers()
        assert optimizer.skipped_steps == model.skipped


@pytest.mark.slow_rows("trains with several optimizers")
@pytest.mark.parametrize("emit", ["eager", "inductor"])
def test_a_long_run_of_powers_of_two_is_exact(emit: str) -> None:
    """The largest steps of the default scale: up to its ceiling, and down to its floor."""
    scale = LossScale.dynamic(growth_interval=2, min_scale=2.0**-3)
    model = Model(scale.rule, scale.value)
    _, step = stepper(scale, emit)
    for gradient in [1.0] * 20 + [INF] * 30 + [1.0, NAN, 1.0, 1.0, 1.0]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MPCompileWarning)
            step(gradient)
        model.step(not math.isfinite(gradient))
        assert scale.state.saved() == model.saved()
    assert scale.value == 2.0**-2


def test_without_a_forward_the_scale_stays() -> None:
    """Of several steps after one forward the first moves it; all count what they skip."""
    scale = LossScale.dynamic(init_scale=8.0)
    optimizer, step = stepper(scale)
    step(INF)
    optimizer.step()
    assert (scale.value, scale.skipped_steps, scale.state.good_steps) == (4.0, 2, 0)


@pytest.mark.parametrize("floor", [2.0, 0.1])
@pytest.mark.parametrize("generated", [False, True])
def test_it_warns_at_the_floor_once(floor: float, generated: bool) -> None:
    scale = LossScale.dynamic(init_scale=2 * floor, min_scale=floor)
    _, step = stepper(scale)
    if not generated:  # the guard settles the steps of other optimizers

        def step(gradient: float) -> None:
            scale.saw_forward()
            scale.settle(not math.isfinite(gradient))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(INF)  # down to the floor, which is no reason to worry yet
        step(1.0)
        assert not caught
        for _ in range(4):
            step(INF)
    assert [w.category for w in caught] == [MPCompileWarning]
    assert f"at its floor ({floor:g})" in str(caught[0].message)
    assert scale.value == pytest.approx(floor)


# -- nobody waits -----------------------------------------------------------------------------


class NoRead(TorchDispatchMode):
    """Fails where a value leaves the device, or would on one."""

    READS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.nonzero.default,
             aten.equal.default)  # fmt: skip

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func not in self.READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def train(
    make: Any, emit: str, device: str, quiet: Any, dump: Path | None = None
) -> tuple[MPOptimizer, Any, list[float]]:
    """100 steps: an lr schedule, an accumulation of 2, and two overflows. Returns the lrs too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    options: dict[str, Any] = {"emit": "eager", "strict": True, "loss_scale": "grad_scaler"}
    model = mpcompile(plain, dtype=torch.float16, **options)
    optimizer = MPOptimizer(make(model.parameters()), emit=emit, max_grad_norm=1.0, dump=dump)
    scheduler = StepLR(optimizer, 10, 0.9)
    lrs: list[float] = []
    for i in range(100):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(4, 8, device=device) * (1e6 if i in (30, 60) else 1)
            (model(x).square().mean() / 2).backward()
        if i < 2:
            optimizer.step()  # traced, and compiled
        else:
            with quiet():
                optimizer.step()
                optimizer.skipped, optimizer.grad_norm  # reading these is free
        scheduler.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    return optimizer, model, lrs


def check_trained(optimizer: MPOptimizer, model: Any, lrs: list[float]) -> None:
    assert len(set(lrs)) == 11
    assert optimizer.compilations <= 2
    assert optimizer.skipped_steps == 2
    assert loss_scale_of(model).value == 2.0**14
    assert loss_scale_of(model).state.good_steps == 39
    assert all(p.isfinite().all() for p in model.parameters())


MAKES = pytest.mark.parametrize(
    "make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: AdamW(p, lr=1e-2)]
)


@pytest.mark.slow("trains with several optimizers")
@MAKES
@pytest.mark.parametrize("emit", ["eager", "inductor"])
def test_a_hundred_steps_read_nothing_back(make: Any, emit: str, tmp_path: Path) -> None:
    before = torch._dynamo.utils.counters["graph_break"].copy()
    optimizer, model, lrs = train(make, emit, "cpu", NoRead, tmp_path)
    assert torch._dynamo.utils.counters["graph_break"] == before
    check_trained(optimizer, model, lrs)
    texts = {path: path.read_text() for path in tmp_path.rglob("*.txt")}
    final = [text for path, text in texts.items() if "rewritten" in path.name]
    assert final
    for text in final:
        assert "where" in text
        kept = [line for line in text.splitlines() if not line.startswith("-")]
        assert not any("_local_scalar_dense" in line for line in kept)


@pytest.mark.gpu
@MAKES
@pytest.mark.parametrize("emit", ["eager", "inductor"])
def test_a_hundred_steps_do_not_wait_for_the_gpu(make: Any, emit: str) -> None:
    class Quiet:
        def __enter__(self) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_: object) -> None:
            torch.cuda.set_sync_debug_mode("default")

    check_trained(*train(make, emit, "cuda", Quiet))


def test_a_given_scale_is_the_one_its_models_use() -> None:
    scale = LossScale.dynamic(init_scale=2.0**9)
    model = mpcompile(nn.Linear(4, 4), dtype=torch.float16, emit="eager")
    adam = torch.optim.Adam(model.parameters())
    optimizer = MPOptimizer(adam, emit="eager", loss_scale=scale)
    assert loss_scale_of(model) is scale
    model(torch.randn(2, 4)).mean().backward()
    assert scale.used.item() == 2.0**9
    optimizer.step()
    model(torch.full((2, 4), 1e4)).mul(1e5).sum().backward()  # overflows on its way through FP16
    optimizer.step()
    assert optimizer.skipped
    assert scale.value == 2.0**8


@pytest.mark.parametrize("handed", ["to the model, too", "as a number", "too late"])
def test_a_given_scale_that_its_model_does_not_use_is_refused(handed: str) -> None:
    given: dict[str, Any] = {"to the model, too": LossScale.static(4.0), "as a number": 4.0}
    own = {"loss_scale": given[handed]} if handed in given else {}
    model = mpcompile(nn.Linear(4, 4), dtype=torch.float16, emit="eager", **own)
    if handed == "too late":
        model(torch.randn(2, 4)).sum()
    adam = torch.optim.Adam(model.parameters())
    optimizer = MPOptimizer(adam, emit="eager", loss_scale=LossScale.static(8.0))
    model(torch.randn(2, 4)).mean().backward()
    with pytest.raises(MPCompileError, match="scales by another"):
        optimizer.step()
