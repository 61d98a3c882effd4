"""`explain` says what a compile then does: node by node, cast by cast, line by line."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from explained import MODELS, checkpointed, squared
from torch import nn

from mpcompile import MPOptimizer, Policy, compiled_plans, explain, mpcompile
from mpcompile.plans import GraphPlan

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
