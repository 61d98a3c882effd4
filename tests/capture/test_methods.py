"""Decorated methods: each object trains what is its own. And what else is done to a model that
mpcompile() compiled, within what someone compiles with something else.
"""

import copy
import functools
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from compare import assert_near
from torch import Tensor, nn

from mpcompile import MPCompileError, compiled_plans, loss_scale_of, mpcompile

# -- methods ---------------------------------------------------------------------------------------


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


# -- compiled around -------------------------------------------------------------------------------


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def both() -> tuple[nn.Module, nn.Module]:
    net, reference = made(), made()
    reference.load_state_dict(net.state_dict())
    return mpcompile(net, dtype=torch.float16, emit="aot_eager"), reference


def test_compiled_once_more() -> None:
    """Dynamo would trace through it, and nothing would be left of us."""
    net, reference = both()
    outer = torch.compile(net, backend="aot_eager")
    x = torch.randn(4, 16)
    for _ in range(2):
        outer(x).sum().backward()
        reference(x).sum().backward()
    (plan,) = compiled_plans(net)
    assert [n.op for n in plan.nodes if n.precision == "LOW"].count("aten::linear") == 2
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert_near(p.grad, q.grad, "gradient", 1e-2)


def test_as_one_graph_it_can_not_be() -> None:
    net, _ = both()
    outer = torch.compile(net, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compiled this by itself"):
        outer(torch.randn(4, 16))


@pytest.mark.parametrize("is_step", [False, True])
def test_a_function_compiled_around(is_step: bool) -> None:
    net, x = made(), torch.randn(4, 16)

    def forward(x: Tensor) -> Tensor:
        out = net(x)
        if is_step:
            out.sum().backward()
        return out

    run = mpcompile(forward, **OPTIONS)
    found = torch.compile(lambda x: run(x) * 1, backend="aot_eager")(x)
    assert torch.equal(found, run(x))
    assert not torch.equal(found, net(x))


def test_copies_stay_plain() -> None:
    net, x = both()[0], torch.randn(4, 16)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        around = torch.compile(nn.Sequential(copied), backend="aot_eager", fullgraph=True)
        assert torch.equal(around(x), copied(x))


def test_within_a_function_of_ours_it_is_a_part_of_the_graph() -> None:
    net, _ = both()
    whole = mpcompile(lambda x: net(x) * 2, dtype=torch.float16, emit="aot_eager", fullgraph=True)
    whole(torch.randn(4, 16))
    assert compiled_plans(net) == []
    assert len(compiled_plans(whole)) == 1


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_after_the_first_call_is_refused(dtype: torch.dtype, level: str) -> None:
    model = mpcompile(net(), level=level, dtype=torch.float16, emit="eager", strict=True)
    x = torch.randn(4, 8)
    before = model(x).detach()
    for _ in range(2):
        model.to(dtype)
        with pytest.raises(MPCompileError, match=r"cast after mpcompile.*deepcopy\(model\)\.to"):
            model(x.to(dtype))
    plain = copy.deepcopy(model)  # the way out that the message names
    assert plain(x.to(dtype)).dtype is dtype
    model.float()
    torch.testing.assert_close(model(x), before, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_torchscript_and_export_trace_the_plain_model() -> None:
    """Before the first call and after it, by itself and inside of another module. (torch's own
    check of a trace compares with the compiled model, and would warn of its rounding.)
    """
    plain = net()
    model = mpcompile(copy.deepcopy(plain), dtype=torch.float16, emit="eager", strict=True)
    function = mpcompile(lambda x: x @ x.t(), dtype=torch.float16, emit="eager", strict=True)
    x = torch.randn(4, 8)
    for _ in range(2):
        for module in (model, nn.Sequential(model)):
            traced = torch.jit.trace(module, x, check_trace=False)
            torch.testing.assert_close(traced(x), plain(x), rtol=0, atol=0)
            exported = torch.export.export(module, (x,), strict=True).module()
            torch.testing.assert_close(exported(x), plain(x), rtol=0, atol=0)
        traced = torch.jit.trace(function, x, check_trace=False)
        torch.testing.assert_close(traced(x), x @ x.t(), rtol=0, atol=0)
        model(x).sum().backward()
        function(x)
