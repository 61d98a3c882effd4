"""`explain` leaves everything as it was, and says what a compile does, node by node."""

import copy
import dataclasses
import gc
import itertools
import logging
import random
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from explained import MODELS, checkpointed, pictures, squared
from torch import nn
from torch._dynamo.eval_frame import cached_backends
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor

from mpcompile import MPOptimizer, Policy, compiled_plans, explain, loss_scale_of, mpcompile
from mpcompile.capture import compile_log
from mpcompile.plans import GraphPlan
from mpcompile.preview.explain import Planner
from mpcompile.preview.stand_ins import StandIns
from mpcompile.scaling import guard, parameters, uncalled

Model = tuple[nn.Module, torch.Tensor, MPOptimizer]


@pytest.fixture
def trained() -> Model:
    """A model in the middle of its training in FP16: with gradients, copies and a loss scale."""
    model, x = pictures(), MODELS[pictures]()
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    mpcompile(model, dtype=torch.float16, level="O2", emit="eager")
    model(x).sum().backward()
    optimizer.step()
    model(x).sum().backward()
    return model, x, optimizer


def state(model: nn.Module) -> dict[str, Any]:
    """All that training reads or writes."""
    scale = loss_scale_of(model)
    return copy.deepcopy(
        {
            "tensors": {name: t.tolist() for name, t in model.state_dict().items()},
            "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
            "types": [type(p).__name__ for p in model.parameters()],
            "scale": (scale.value, scale.skipped_steps),
            "plans": len(compiled_plans(model)),
            "random": (torch.get_rng_state().tolist(), random.getstate()),
            "numpy": np.random.get_state()[1].tolist(),  # type: ignore[union-attr]
            "changes": parameters.changes(),
            "dynamo": (dict(counters), set(cached_backends)),
            "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), gc.isenabled()),
            "low": compile_log.say_nothing_runs_low.cache_info(),
        }
    )


def known() -> list[Any]:
    """What the library knows of in this process. What earlier tests left there lives on with it."""
    return [*guard._live, *uncalled._waiting]


@pytest.mark.slow("plans of several models")
@pytest.mark.parametrize("device", [None, "t4"])
def test_nothing_happens_in_the_middle_of_a_training(trained: Model, device: str | None) -> None:
    model, x, optimizer = trained
    called, before, there = model._compiled_call_impl, state(model), known()
    assert explain(model, x, device=device).level == "O2"
    assert state(model) == before
    assert [id(x) for x in known() if not any(x is y for y in there)] == []
    assert model._compiled_call_impl is called
    optimizer.step()  # and it goes on
    assert state(model)["tensors"] != before["tensors"]


@pytest.mark.slow("plans of several models")
def test_what_is_compiled_is_not_compiled_again(trained: Model) -> None:
    model, x, _ = trained
    for rows in (2, 3, 4):
        explain(model, torch.rand(rows, *x.shape[1:]))
    model(x)
    assert len(compiled_plans(model)) == 1


def test_the_hint_about_a_slow_device_stays_for_the_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes once in a process: `explain` must not use it up."""
    from mpcompile.devices.cpu import CPU

    monkeypatch.setattr(CPU, "has_units", lambda *_: False)
    monkeypatch.setenv("MPCOMPILE_PROFILE", "")
    compile_log.say_nothing_runs_low.cache_clear()
    model = nn.Sequential(nn.Linear(8, 8))
    with caplog.at_level(logging.WARNING, "mpcompile"):
        explain(model, torch.ones(4, 8))
        assert "so they stay in FP32" not in caplog.text
        mpcompile(model, emit="eager")(torch.ones(4, 8))
    assert "so they stay in FP32" in caplog.text
    compile_log.say_nothing_runs_low.cache_clear()


@pytest.mark.slow("plans of several models")
def test_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the model's copy, nor what planned, nor the graphs that it planned."""
    kept: list[weakref.ref[Any]] = []
    plan, of_module = Planner.planned, StandIns.of_module

    def spy(self: Planner, gm: Any, example_inputs: Any) -> Any:
        kept.extend(map(weakref.ref, (self, gm)))
        return plan(self, gm, example_inputs)

    def copied(self: StandIns, module: nn.Module) -> nn.Module:
        twin = of_module(self, module)
        kept.append(weakref.ref(twin))
        return twin

    monkeypatch.setattr(Planner, "planned", spy)
    monkeypatch.setattr(StandIns, "of_module", copied)
    model, x = pictures(), MODELS[pictures]()
    for _ in range(2):
        explain(model, x, dtype=torch.float16)
    gc.collect()
    assert len(kept) == 6
    assert [ref() for ref in kept] == [None] * 6


def test_tensors_that_are_no_parameters_have_no_copies_with_data() -> None:
    module = nn.BatchNorm1d(4)
    module.kept = [torch.ones(3)]  # type: ignore[assignment]
    copied: Any = StandIns().of_module(module)
    for tensor in (copied.weight, copied.running_mean, copied.kept[0]):
        assert isinstance(tensor, FakeTensor)


HALF = [torch.float16, torch.bfloat16]
SAMPLE = [("O1", torch.bfloat16), ("O2", torch.float16)]
ALL = [
    pytest.param(*pair, marks=() if pair in SAMPLE else pytest.mark.sweep("other levels"))
    for pair in itertools.product(("O1", "O2", "O3"), HALF)
]


def decided(plans: Sequence[GraphPlan]) -> list[GraphPlan]:
    """Without what a compile doesn't tell (the backward), and without wall times."""
    return [dataclasses.replace(plan, seconds={}, backward=(), saved=()) for plan in plans]


def compiled(model: nn.Module, x: torch.Tensor, optimizer: Any, **options: Any) -> list[GraphPlan]:
    """The plans of a real step."""
    torch._dynamo.reset()
    mpcompile(model, emit="eager", **options)
    model(x).float().sum().backward()
    optimizer.step()
    return decided(compiled_plans(model))


def check(model: nn.Module, x: torch.Tensor, optimizer: Any, **options: Any) -> None:
    before = explain(model, x, **options)
    real = compiled(model, x, optimizer, **options)
    assert decided(before.graphs) == real
    assert decided(explain(model, x).graphs) == real  # with the options of the compile
    assert any(plan.nodes and plan.before and plan.after for plan in real)


@pytest.mark.slow_rows("plans of several models")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("level", "dtype"), ALL)
@pytest.mark.parametrize("kind", MODELS)
def test_any_optimizer(kind: type[nn.Module], level: str, dtype: torch.dtype) -> None:
    model = kind()
    check(model, MODELS[kind](), torch.optim.SGD(model.parameters(), 0.1), level=level, dtype=dtype)


@pytest.mark.slow("plans of several models")
@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", MODELS)
def test_an_mp_optimizer_at_o2(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """It is found by itself; the graph reads its copies."""
    model = kind()
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    check(model, MODELS[kind](), optimizer, level="O2", dtype=dtype)
    plans = explain(model, MODELS[kind](), mp_optimizer=False).graphs
    assert decided(plans) != decided(compiled_plans(model))


@pytest.mark.slow("plans of several models")
def test_an_mp_optimizer_of_some_parameters() -> None:
    model, x = squared(), MODELS[squared]()
    optimizer = MPOptimizer(torch.optim.SGD(model.second.parameters(), 0.1))
    check(model, x, optimizer, level="O2", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (checkpointed, {"policy": Policy(modules={"head": "fp32"}, full=["gelu"])}),
        (squared, {"pad": "always", "disable_passes": ["functionalize"]}),
    ],
)
def test_other_options(kind: type[nn.Module], options: Any) -> None:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    check(model, MODELS[kind](), optimizer, dtype=HALF[0], **options)


@pytest.mark.parametrize("loss_scale", ["none", 8.0])
def test_the_loss_scale_of_the_compile(loss_scale: Any) -> None:
    model, x = squared(), MODELS[squared]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    real = compiled(model, x, optimizer, dtype=torch.float16, loss_scale=loss_scale)
    assert decided(explain(model, x).graphs) == real
    assert [plan.scaled for plan in real] == [loss_scale != "none"]


def test_level_o0() -> None:
    model, x = squared(), MODELS[squared]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = explain(model, x, level="O0")
    assert decided(before.graphs) == compiled(model, x, optimizer, level="O0")
    assert before.left == ('level="O0" was asked for',)
    assert (before.level, before.dtype) == ("O0", "float32")
    products = [node.result for node in before.graphs[0].backward if node.op == "aten::mm"]
    assert len(products) == 3  # the input of the first layer needs no gradient
    assert all(result.startswith("f32") for result in products)


def test_the_samples_of_a_kernel_are_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins any kernel would seem to be there."""
    from torch._subclasses.fake_tensor import FakeTensor

    from mpcompile.rules import kernels

    seen = []
    sample = kernels._sample

    def spy(*args: Any) -> Any:
        made = sample(*args)
        seen.append(isinstance(made, FakeTensor))
        return made

    monkeypatch.setattr(kernels, "_sample", spy)
    monkeypatch.setattr(kernels, "_answers", {})
    explain(squared(), MODELS[squared]())
    assert seen
    assert not any(seen)
