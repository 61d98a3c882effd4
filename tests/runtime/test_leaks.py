"""What was compiled of a model is gone when the model is, without `torch.compiler.reset()`."""

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

from mpcompile import MPOptimizer, loss_scale_of, mpcompile
from mpcompile.optim.step import CompiledStep
from mpcompile.planner.graph_plan import GraphPlan
from mpcompile.scaling.loss_scale import LossScale
from mpcompile.torch_inside.owned_backend import compiled_by, drop_unused, with_own_code

pytestmark = [pytest.mark.slow("trains, drops it, and looks at what is left"), pytest.mark.inside]

# What each model has of its own, and what would hold it: graphs with their fakes, plans, steps.
KINDS = (CompiledStep, GraphPlan, LossScale, fx.GraphModule, fx.Node, nn.Module)


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.relu()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))


def plain_optimizer() -> None:
    model = mpcompile(net(), dtype=torch.float16, emit="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters())
    for factor in (1.0, 1e30, 1.0):
        (model(torch.randn(3, 8)).sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(3, 8))
    assert loss_scale_of(model).skipped_steps == 1


def generated_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Breaks(), nn.Linear(8, 4))
    model = mpcompile(model, dtype=torch.float16, level="O2", emit="aot_eager")
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters()), emit="eager")
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def regional() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
    model = mpcompile(nn.Sequential(*layers), dtype=torch.float16, emit="eager", regional=True)
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
    with torch.no_grad():
        model(torch.randn(3, 8))


def whole_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @mpcompile(dtype=torch.float16, emit="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(2):
        step(torch.randn(3, 8))


def alive() -> Counter[str]:
    """How many objects of each kind there are."""
    for _ in range(3):  # what goes with a function is collected after it
        drop_unused()
        gc.collect()
    seen = Counter(map(type, gc.get_objects()))
    return Counter({k.__name__: sum(n for t, n in seen.items() if issubclass(t, k)) for k in KINDS})


@pytest.fixture(autouse=True)
def nothing_is_logged() -> Iterator[None]:
    """Pytest keeps the records of a test, and torch's trace hands graphs to these. And nothing
    that was there before is walked over.
    """
    logging.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("train", [plain_optimizer, generated_step, regional, whole_step])
def test_a_model_leaves_nothing_behind(train: Callable[[], Any]) -> None:
    train()
    train()  # what is made once for all models is there
    before = alive()
    train()
    assert alive() <= before


def test_a_function_may_go_while_its_code_is_reset() -> None:
    """It is held by what was compiled of it alone: torch freed the code's entries twice."""

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        own = functions.pop()
        return lambda *args: (own, gm(*args))[1]

    functions = [with_own_code(lambda x: x + 1, "adds_one")]
    held = weakref.ref(functions[0])
    compiled_by(backend, functions[0])(torch.ones(2))
    gc.collect()
    assert held() is not None
    torch.compiler.reset()
    assert held() is None
    drop_unused()
