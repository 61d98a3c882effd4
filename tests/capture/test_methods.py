"""Decorated methods: they bind like any function, and each object trains what is its own."""

import copy
import functools
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile import compiled_plans, loss_scale_of, mpcompile

OPTIONS: dict[str, Any] = {"dtype": torch.float16, "emit": "aot_eager", "strict": True}
X = torch.linspace(-1, 1, 32).reshape(4, 8)


def train(self: Any, x: Tensor, factor: float = 1.0) -> Tensor:
    """A step of SGD; as plain PyTorch, the reference of all that is decorated here."""
    loss = self.model(x).square().mean() * factor
    loss.backward()
    self.optimizer.step()
    self.optimizer.zero_grad()
    return loss.detach()  # type: ignore[no-any-return]


class Parts:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


class Trainer(Parts):
    step = mpcompile(train, **OPTIONS)
    doubled = functools.partialmethod(step, factor=2.0)

    @mpcompile(**OPTIONS)
    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


class Derived(Trainer):
    """It has the method of its base."""


class Slots:
    """No weak reference to such an object is possible."""

    __slots__ = ("model", "optimizer")
    __init__ = Parts.__init__
    step = mpcompile(train, **OPTIONS)


def check(trainers: list[Any], steps: int = 3, method: str = "step", factor: float = 1.0) -> None:
    """Each trains as its plain twin: FP16 has 11 bits."""
    twins = [Parts(seed) for seed in range(len(trainers))]
    for _ in range(steps):
        for trainer, twin in zip(trainers, twins, strict=True):
            found, wanted = getattr(trainer, method)(X), train(twin, X, factor)
            torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-3)
    for trainer, twin in zip(trainers, twins, strict=True):
        wanted = twin.model.state_dict()
        torch.testing.assert_close(trainer.model.state_dict(), wanted, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("cls", [Trainer, Derived])
def test_each_object_has_graphs_and_a_scale_of_its_own(cls: type[Trainer]) -> None:
    first, second = cls(0), cls(1)
    check([first, second])
    for trainer in (first, second):
        assert trainer.step.left is None  # type: ignore[attr-defined]
        assert [plan.left for plan in compiled_plans(trainer.step)] == [None]
    assert loss_scale_of(first.step) is not loss_scale_of(second.step)
    assert loss_scale_of(first.step) is loss_scale_of(first.step)
    loss_scale_of(first.loss)


def test_a_method_with_some_arguments_given() -> None:
    check([Trainer(0)], method="doubled", factor=2.0)


def test_an_object_without_weak_references() -> None:
    check([Slots(0)])


def test_an_object_is_not_kept_alive() -> None:
    trainer = Trainer()
    trainer.step(X)
    known = [weakref.ref(trainer), weakref.ref(trainer.model)]
    del trainer
    gc.collect()
    assert [reference() for reference in known] == [None, None]


@pytest.mark.slow("compiles many graphs")
def test_methods_of_a_class() -> None:
    class Static(Parts):
        @mpcompile(**OPTIONS)
        @staticmethod
        def inner_static(trainer: Any, x: Tensor) -> Tensor:
            return train(trainer, x)

        @staticmethod
        @mpcompile(**OPTIONS)
        def outer_static(trainer: Any, x: Tensor) -> Tensor:
            loss = trainer.model(x).square().mean()
            loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            return loss.detach()  # type: ignore[no-any-return]

    trainer, twin = Static(0), Parts(0)
    for step in (trainer.outer_static, Static.outer_static, Static.inner_static):
        torch.testing.assert_close(step(trainer, X), train(twin, X), rtol=2e-3, atol=1e-3)

    class Class:
        model: nn.Module
        optimizer: torch.optim.Optimizer
        outer = classmethod(mpcompile(train, **OPTIONS))
        inner = mpcompile(classmethod(train), **OPTIONS)  # type: ignore[type-var]

    for step in (Class.outer, Class().outer, Class.inner, Class().inner):
        parts, twin = Parts(0), Parts(0)
        Class.model, Class.optimizer = parts.model, parts.optimizer
        torch.testing.assert_close(step(X), train(twin, X), rtol=2e-3, atol=1e-3)  # type: ignore[operator]
        torch.testing.assert_close(
            parts.model.state_dict(), twin.model.state_dict(), rtol=2e-3, atol=1e-3
        )


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    step = mpcompile(train, **OPTIONS)


def test_a_module_is_copied_and_pickled_as_without_the_method() -> None:
    module = Module()
    module.step(X)
    copied, pickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    results = [one.step(X) for one in (module, copied, pickled)]
    assert results[0] == results[1] == results[2]
    for one in (copied, pickled):
        torch.testing.assert_close(one.state_dict(), module.state_dict(), rtol=0, atol=0)
