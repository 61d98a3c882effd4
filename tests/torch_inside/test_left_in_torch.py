"""What stands in the place of something of torch's is gone when the compile is."""

import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import MPOptimizer, mpcompile
from mpcompile.torch_inside.replace import Spot

pytestmark = pytest.mark.slow("each part of the package, in a process of its own")

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property)
HALF: dict[str, Any] = {"dtype": torch.float16, "emit": "aot_eager"}

Step = Callable[[torch.Tensor], Any]


def functions() -> Iterator[tuple[Any, str, Any]]:
    """Every function in a module or a class of torch's, by the one that holds it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
        for holder in (module, *classes):
            for key, value in list(vars(holder).items()):
                if isinstance(value, FUNCTIONS):
                    yield holder, key, value


def plain(model: nn.Module) -> Step:
    net: Step = torch.compile(model, backend="aot_eager")
    for cls in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor):
        cls(model.parameters(), lr=0.01)  # torch wraps a class's step when it makes the first
    return lambda x: net(x).sum().backward()


def in_pieces(level: str, optimizer: Callable[..., Any]) -> Callable[[nn.Module], Step]:
    def make(model: nn.Module) -> Step:
        net, opt = mpcompile(model, level=level, **HALF), optimizer(model.parameters())

        def step(x: torch.Tensor) -> None:
            net(x).square().mean().backward()
            net(torch.cat([x, x])).square().mean().backward()  # traced while gradients are there
            opt.step()
            opt.zero_grad()

        return step

    return make


def whole(model: nn.Module) -> Step:
    opt = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return mpcompile(step, level="O2", **HALF)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01)


def adafactor(parameters: Any) -> Any:
    return MPOptimizer(torch.optim.Adafactor(parameters, lr=0.01))


def train(make: Callable[[nn.Module], Step]) -> None:
    step = make(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    for size in (2, 3, 2):
        step(torch.randn(size, 4))


@pytest.mark.filterwarnings("ignore")
def test_torch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was replaced is noted as it happens; and no other function of torch's has changed."""
    first: dict[tuple[int, str], tuple[Spot, Any]] = {}
    hold = Spot.hold

    def noting(spot: Spot, value: Any) -> None:
        first.setdefault((id(spot.holder), spot.name), (spot, spot.held()))
        hold(spot, value)

    monkeypatch.setattr(Spot, "hold", noting)
    train(plain)
    before = {(id(holder), name): value for holder, name, value in functions()}
    train(in_pieces("O1", sgd))
    # The second, where another test of this process has stored low gradients.
    assert {spot.name for spot, _ in first.values()} <= {
        "_is_compiling_flag", "safe_grad", torch.autograd.grad,
    }  # fmt: skip
    train(in_pieces("O2", adafactor))
    train(whole)
    gc.collect()
    names = {spot.name for spot, _ in first.values()}
    assert {"_is_compiling_flag", "safe_grad", "min", "max", "store_attr", "banned_attrs"} <= names
    assert not [spot for spot, was in first.values() if spot.held() is not was]
    changed = [
        (holder.__name__, name)
        for holder, name, value in functions()
        if before.get((id(holder), name), value) is not value
    ]
    assert not changed
