"""What `step` of anybody's optimizer is given arrives there, whatever is compiled; a closure, too,
whose gradients are checked.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from overflowing import FP16, OVERFLOW, assert_unchanged, mlp, parameters
from torch import nn

from mpcompile import MPCompileWarning, loss_scale_of, mpcompile
from mpcompile.whole_step.tracing import traceable_optimizers

LR = 0.1


class Scaled(torch.optim.SGD):
    """Its step takes a factor first."""

    def step(self, factor: float = 1.0, closure: Any = None) -> Any:  # type: ignore[override]
        self.given = factor
        loss = None if closure is None else closure()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-LR * (factor if factor is not None else 1.0))
        return loss


class HandsOn(torch.optim.SGD):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


class MakesAClosure(torch.optim.SGD):
    """Its step takes what the loss is made of, and makes a closure for SGD's."""

    def step(self, data: torch.Tensor, loss_of: Callable[..., Any]) -> Any:  # type: ignore[override]
        self.given = loss_of
        return super().step(lambda: loss_of(data))


class AsksTwice(torch.optim.SGD):
    """Its step runs the closure with an argument, and asks it for an attribute."""

    def step(self, closure: Any = None) -> Any:
        self.given = closure.name
        return super().step(lambda: closure(twice=True))


@pytest.fixture(autouse=True)
def something_compiled() -> nn.Module:
    """Someone's compiled model, with which no optimizer here has to do, if not told otherwise."""
    compiled = mpcompile(mlp(), **FP16)
    compiled(torch.randn(4, 8)).sum().backward()
    return compiled


@pytest.mark.parametrize(
    "call",
    [
        lambda o: o.step(0.5),
        lambda o: o.step(0.5, None),
        lambda o: o.step(0.5, closure=None),
        lambda o: o.step(factor=0.5),
        lambda o: o.step(torch.tensor(0.5)),
    ],
)
def test_a_number_arrives(call: Callable[[Any], Any]) -> None:
    """By lr * factor * gradient."""
    model = mlp()
    optimizer = Scaled(model.parameters(), LR)
    model(torch.randn(4, 8)).sum().backward()
    before = parameters(model)
    call(optimizer)
    for old, param in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), old - LR * 0.5 * param.grad)


def test_a_callable_that_is_no_closure_arrives_as_it_is() -> None:
    model = mlp()
    optimizer = Scaled(model.parameters(), LR)
    optimizer.step(model)  # type: ignore[arg-type]  # (there are no gradients to multiply)
    assert optimizer.given is model

    def loss_of(data: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(data).sum()
        loss.backward()
        return loss

    maker = MakesAClosure(model.parameters(), LR)
    maker.step(torch.randn(4, 8), loss_of)
    assert maker.given is loss_of


CLOSURES: dict[str, tuple[type[Any], Callable[[Any, Any, Any], Any]]] = {
    "first": (torch.optim.SGD, lambda o, f, x: o.step(lambda: f(x))),
    "by name": (torch.optim.SGD, lambda o, f, x: o.step(closure=lambda: f(x))),
    "second": (Scaled, lambda o, f, x: o.step(0.5, lambda: f(x))),
    "second, by name": (Scaled, lambda o, f, x: o.step(0.5, closure=lambda: f(x))),
    "handed on": (HandsOn, lambda o, f, x: o.step(lambda: f(x))),
    "handed on by name": (HandsOn, lambda o, f, x: o.step(closure=lambda: f(x))),
    "made in the step": (MakesAClosure, lambda o, f, x: o.step(x, f)),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_a_closure_is_checked_wherever_it_stands(name: str) -> None:
    """The first call of the model, and so its compilation, is in the closure, too."""
    made, step = CLOSURES[name]
    torch.optim.SGD(mlp().parameters(), LR)  # torch hooks the step of this class from now on
    model = mpcompile(mlp(), **FP16)
    optimizer = made(model.parameters(), LR)

    def loss_of(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).mean() * factor
        loss.backward()
        return loss

    x = torch.randn(4, 8)
    before = parameters(model)
    assert torch.isfinite(step(optimizer, loss_of, x))
    assert not torch.equal(model[0].weight, before[0])
    before = parameters(model)
    step(optimizer, lambda x: loss_of(x, OVERFLOW), x)
    assert_unchanged(before, model)
    assert loss_scale_of(model).skipped_steps == 1


def test_a_closure_is_called_with_what_the_step_gives_it() -> None:
    model = mlp()
    optimizer = AsksTwice(model.parameters(), LR)
    seen = []

    def closure(twice: bool = False) -> torch.Tensor:
        seen.append(twice)
        return torch.ones(())

    closure.name = "mine"  # type: ignore[attr-defined]
    optimizer.step(closure)
    assert (seen, optimizer.given) == ([True], "mine")


def test_a_number_given_in_a_training_step_arrives() -> None:
    """A step that takes more than gradients is no part of a graph: the function runs in pieces."""
    model = mlp()
    plain = copy.deepcopy(model)
    optimizers = [Scaled(m.parameters(), LR) for m in (model, plain)]

    def train(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(0.5)
        optimizer.zero_grad()
        return loss.detach()

    compiled = mpcompile(train, level="O0", emit="eager")
    for i in range(2):
        x = torch.randn(4, 8)
        if i == 0:
            with pytest.warns(MPCompileWarning, match="in pieces"):
                compiled(model, optimizers[0], x)
        else:
            compiled(model, optimizers[0], x)
        train(plain, optimizers[1], x)
        torch.testing.assert_close(parameters(model), parameters(plain))


def test_another_threads_steps_get_their_arguments_while_a_function_is_traced() -> None:
    model = mlp()
    optimizer = Scaled(model.parameters(), LR)
    model(torch.randn(4, 8)).sum().backward()
    before = parameters(model)
    with traceable_optimizers(), ThreadPoolExecutor(1) as pool:
        pool.submit(optimizer.step, factor=0.5, closure=None).result()
    gradient = model[0].weight.grad
    torch.testing.assert_close(model[0].weight.detach(), before[0] - LR * 0.5 * gradient)
