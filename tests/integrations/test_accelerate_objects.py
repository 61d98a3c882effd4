"""What `MPCompileAccelerator` does with single objects, its arguments, and its checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import LossScale, MPCompileError, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.records import compiled_in

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, GradScalerKwargs

from mpcompile.integrations.accelerate import MPCompileAccelerator

FP16 = {"dtype": torch.float16, "emit": "eager"}


def ours(options: Any = None, **more: Any) -> MPCompileAccelerator:
    return MPCompileAccelerator(mpcompile={**FP16, **(options or {})}, cpu=True, **more)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- one object at a time --------------------------------------------------------------------------


def test_a_model_and_an_optimizer_by_themselves() -> None:
    accelerator = ours({"level": "O2"}, compile_optimizers=True)
    model = accelerator.prepare_model(nn.Linear(4, 4))
    assert compiled_in(model) == [model]
    optimizer = accelerator.prepare_optimizer(sgd(model))
    assert isinstance(optimizer.optimizer, MPOptimizer)


def test_the_optimizer_may_stand_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MPOptimizer is made for parameters whose model is compiled already."""
    model, seen = nn.Linear(4, 4), []
    make = MPOptimizer._start

    def start(self: MPOptimizer) -> None:
        seen.append(compiled_in(model))
        make(self)

    monkeypatch.setattr(MPOptimizer, "_start", start)
    ours(compile_optimizers=True).prepare(sgd(model), model)
    assert seen == [[model]]


def test_a_model_for_evaluation() -> None:
    accelerator = ours()
    for dtype, compiled in ((torch.float32, True), (torch.bfloat16, False)):
        model = accelerator.prepare_model(nn.Linear(4, 4, dtype=dtype), evaluation_mode=True)
        assert bool(compiled_in(model)) is compiled
    with pytest.raises(MPCompileError, match="low dtype is float16"):
        accelerator.prepare_model(nn.Linear(4, 4, dtype=torch.bfloat16))


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"mpcompile": "O2"}, "'O2'"),
        ({"mpcompile": {"levle": "O2"}}, "did you mean 'level'"),
        ({"compile_optimizers": "no"}, "compile_optimizers='no'"),
        ({"kwargs_handlers": [AutocastKwargs(enabled=False)]}, "AutocastKwargs"),
        (
            {"kwargs_handlers": [GradScalerKwargs()], "mpcompile": {"loss_scale": 8.0}},
            "GradScalerKwargs",
        ),
    ],
)
def test_a_bad_argument_is_refused_at_once(told: dict[str, Any], message: str) -> None:
    with pytest.raises(MPCompileError, match=message):
        MPCompileAccelerator(cpu=True, **told)


def test_the_arguments_of_a_grad_scaler() -> None:
    told = GradScalerKwargs(init_scale=1024, growth_interval=7, growth_factor=4.0)
    accelerator = ours(kwargs_handlers=[told])
    first, second = (accelerator.prepare_model(nn.Linear(4, 4)) for _ in range(2))
    scale = loss_scale_of(first)
    assert (scale.value, scale.growth_interval, scale.growth_factor) == (1024.0, 7, 4.0)
    assert scale.backoff_factor == GradScalerKwargs().backoff_factor
    assert loss_scale_of(second) is not scale


def test_a_grad_scaler_that_is_off() -> None:
    accelerator = ours(kwargs_handlers=[GradScalerKwargs(enabled=False, init_scale=1024)])
    assert loss_scale_of(accelerator.prepare_model(nn.Linear(4, 4))).kind == "none"


# -- checkpoints -----------------------------------------------------------------------------------


class Two(nn.Module):
    """Two modules that are compiled each by itself; an MPOptimizer steps the first."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a = mpcompile(nn.Linear(4, 4), **FP16, loss_scale=LossScale.dynamic(a))
        self.b = mpcompile(nn.Linear(4, 4), **FP16, loss_scale=LossScale.dynamic(b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))

    def scales(self) -> list[float]:
        return [loss_scale_of(self.a).value, loss_scale_of(self.b).value]


def test_each_scale_is_saved_whoever_steps_it(tmp_path: Path) -> None:
    def prepared(a: float, b: float) -> tuple[Accelerator, Two]:
        accelerator, model = ours(), Two(a, b)
        first = MPOptimizer(sgd(model.a), emit="eager")
        accelerator.prepare(model, first, sgd(model.b))
        (loss := model(torch.ones(2, 4)).sum()).backward()
        assert loss.isfinite()
        return accelerator, model

    accelerator, model = prepared(32.0, 64.0)
    accelerator.save_state(str(tmp_path))
    other, resumed = prepared(2.0, 4.0)
    other.load_state(str(tmp_path))
    assert resumed.scales() == model.scales() == [32.0, 64.0]


@pytest.mark.slow("trains by a trainer of others")
def test_the_next_model_after_free_memory(tmp_path: Path) -> None:
    accelerator = ours({"loss_scale": 8.0})
    accelerator.prepare(model := nn.Linear(4, 4), sgd(model))
    accelerator.free_memory()
    accelerator.prepare_model(nn.Linear(4, 4))
    accelerator.save_state(str(tmp_path))
    fresh = ours({"loss_scale": 2.0})
    model = fresh.prepare_model(nn.Linear(4, 4))
    fresh.load_state(str(tmp_path))
    assert loss_scale_of(model).value == 8.0


def test_a_plain_accelerators_checkpoint_and_back(tmp_path: Path) -> None:
    plain, mine = Accelerator(cpu=True), ours({"loss_scale": 8.0})
    theirs, model = plain.prepare(nn.Linear(4, 4)), mine.prepare(nn.Linear(4, 4))
    plain.save_state(str(tmp_path / "plain"))
    mine.load_state(str(tmp_path / "plain"))
    assert torch.equal(model.weight, theirs.weight)
    assert loss_scale_of(model).value == 8.0
    nn.init.ones_(model.weight)
    mine.save_state(str(tmp_path / "ours"))
    plain.load_state(str(tmp_path / "ours"))
    assert torch.equal(theirs.weight, torch.ones(4, 4))


def test_another_number_of_compiled_models_is_refused(tmp_path: Path) -> None:
    one, two = ours(), ours()
    one.prepare(nn.Linear(4, 4))
    one.save_state(str(tmp_path))
    two.prepare(Two(1.0, 1.0))
    with pytest.raises(MPCompileError, match="1 compiled modules, and here are 2"):
        two.load_state(str(tmp_path))
