"""A module that is compiled and then trained without being called, as by a trainer."""

import gc
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import COMBINED
from torch import nn
from torch.optim import optimizer as torch_optimizer

from mpcompile import MPCompileWarning, MPOptimizer, compiled_plans, mpcompile
from mpcompile.scaling import uncalled

OPTIONS: dict[str, Any] = {"dtype": torch.float16, "emit": "eager"}


class Lightning(nn.Module):
    """Has what a LightningModule has: a method of its own that makes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.net(x)).square().mean()


class Calling(Lightning):
    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self(x)).square().mean()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def fit(module: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """What a trainer does."""
    for _ in range(steps):
        module.training_step(torch.randn(2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


def warned(module: Any, optimizer: torch.optim.Optimizer) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MPCompileWarning)
        fit(module, optimizer)
    ours = [w for w in caught if w.category is MPCompileWarning]
    assert all(w.filename == __file__ for w in ours)
    return [str(w.message) for w in ours]


def looks() -> bool:
    """Whether a step of an optimizer has anything to look at."""
    return bool(uncalled._waiting)


@pytest.fixture(autouse=True)
def nobody_waits() -> None:
    gc.collect()
    for module in list(uncalled._waiting):
        uncalled.called(module)


@pytest.mark.slow("compiles several models")
@pytest.mark.parametrize("generated", [False, True])
def test_one_warning_says_what_to_do(generated: bool) -> None:
    module = mpcompile(Lightning(), **OPTIONS)
    optimizer = optimizer_of(module)
    assert looks()
    (message,) = warned(module, MPOptimizer(optimizer, emit="eager") if generated else optimizer)
    assert "Lightning was compiled but never called, yet" in message
    assert "self.net = mpcompile(self.net)" in message
    assert not uncalled._waiting


@pytest.mark.slow("compiles several models")
def test_it_is_said_among_hooks_of_the_users() -> None:
    """Torch goes through all hooks as we say it, and in other threads at any time: none is removed
    or added once a module was compiled.
    """
    mpcompile(nn.Linear(8, 4), **OPTIONS)
    hooks = list(torch_optimizer._global_optimizer_pre_hooks.values())
    module, steps = mpcompile(Lightning(), **OPTIONS), []
    handle = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: steps.append(1))
    with handle:
        assert len(warned(module, optimizer_of(module))) == 1
    assert len(steps) == 3
    uncalled.called(next(iter(uncalled._waiting)))
    assert not looks()
    assert list(torch_optimizer._global_optimizer_pre_hooks.values()) == hooks


@pytest.mark.slow("compiles several models")
@pytest.mark.parametrize("name", ["net", "training_step"])
def test_what_it_says_to_do_works(name: str) -> None:
    module = Lightning()
    setattr(module, name, mpcompile(getattr(module, name), **OPTIONS))
    assert warned(module, optimizer_of(module)) == []
    assert not looks()
    assert compiled_plans(getattr(module, name))[0].counts()["LOW"] > 0


def test_a_validation_does_not_hide_that_training_is_not_compiled() -> None:
    module = mpcompile(Lightning(), **OPTIONS)
    with torch.no_grad():
        module(torch.randn(2, 8))
    (message,) = warned(module, optimizer_of(module))
    assert "compiled but never called" in message
    assert not looks()


@pytest.mark.slow("compiles several models")
def test_nor_does_one_inside_a_function_that_is_compiled() -> None:
    module = mpcompile(Lightning(), **OPTIONS)
    module.training_step = mpcompile(module.training_step, **OPTIONS)  # type: ignore[method-assign]
    assert warned(module, optimizer_of(module)) == []
    assert not looks()


@pytest.mark.slow("compiles several models")
def test_nor_one_whose_parameters_are_not_trained_yet() -> None:
    """An optimizer over two networks, of which one waits for its turn."""
    first, second = Lightning(), mpcompile(Lightning(), **OPTIONS)
    assert warned(first, optimizer_of(nn.ModuleList([first, second]))) == []
    assert looks()
    second(torch.randn(2, 8)).sum().backward()
    assert not looks()


@pytest.mark.slow("compiles several models")
def test_other_optimizers_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, other = mpcompile(Lightning(), **OPTIONS), Lightning()
    optimizer = optimizer_of(other)
    fit(other, optimizer, steps=1)
    monkeypatch.setattr(module, "parameters", lambda: pytest.fail("looked at again"))
    fit(other, optimizer, steps=2)


@pytest.mark.slow("compiles several models")
def test_a_module_that_is_gone_is_forgotten() -> None:
    mpcompile(Lightning(), **OPTIONS)
    gc.collect()
    assert len(uncalled._waiting) == 0


@pytest.mark.slow("compiles several models")
@pytest.mark.parametrize("generated", [False, True], ids=["plain", "MPOptimizer"])
def test_a_checkpoint_that_is_loaded_before_the_first_call(generated: bool) -> None:
    """torch.distributed.checkpoint takes a step with a learning rate of 0, to make the state."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    module = mpcompile(Calling(), **OPTIONS)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    if generated:
        optimizer = MPOptimizer(optimizer, emit="eager")
    _, state = get_state_dict(module, optimizer)  # a warning would be an error
    assert set(state["state"]) == {"net.weight", "net.bias"}
    assert module in uncalled._waiting  # it is still looked after


REPLACED = r"Calling.compile\(\) was called after mpcompile\(\) and took its place"


def of_its_forward(module: nn.Module) -> None:
    module.forward = torch.compile(module.forward, backend="eager")  # type: ignore[method-assign]


# What a trainer does with a module that it is given. What it makes of it, if anything, is called.
AGAIN: dict[str, Any] = {
    "compile": lambda m: m.compile(backend="eager"),
    "compile as one graph": lambda m: m.compile(backend="aot_eager", fullgraph=True),
    "compile with sizes": lambda m: m.compile(backend="eager", dynamic=True),
    "compile by a function": lambda m: m.compile(backend=lambda gm, _: gm),
    "compile twice": lambda m: (m.compile(backend="eager"), m.compile(backend="eager"))[0],
    "compile a part": lambda m: m.net.compile(backend="eager"),
    "compile a parent": lambda m: (lambda parent: parent.compile(backend="eager") or parent)(
        nn.Sequential(m)
    ),
    "torch.compile": lambda m: torch.compile(m, backend="eager"),
    "torch.compile of a caller": lambda m: torch.compile(lambda x: m(x), backend="eager"),
    "torch.compile of a parent": lambda m: torch.compile(nn.Sequential(m), backend="aot_eager"),
    "torch.compile of its forward": of_its_forward,
    "mpcompile": lambda m: mpcompile(m, emit="eager"),  # BF16, whose numbers FP16 has, too
}


@pytest.mark.inside
@COMBINED
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("way", AGAIN)
def test_what_is_compiled_again_stays_low_or_it_is_said(way: str, called: bool, how: Any) -> None:
    module: nn.Module = mpcompile(Calling(), **how)
    if called:
        assert not warned(module, optimizer_of(module))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MPCompileWarning)
        made = AGAIN[way](module)
    model = module if made is None else made
    out = model(torch.randn(4, 8))
    if said := [w for w in caught if w.category is MPCompileWarning]:
        assert {w.filename for w in said} == {__file__}
        assert all(re.search(REPLACED, str(w.message)) for w in said)
        mpcompile(module, **how)
        out = module(torch.randn(4, 8))
        assert not warned(module, optimizer_of(module))
    assert (out == out.to(how["dtype"])).all()
    assert bool(said) == (way.startswith("compile") and way[8:] not in ("a part", "a parent"))


def test_other_ends_of_a_call_are_not_said() -> None:
    module = mpcompile(Calling(), **OPTIONS)  # (a warning would be an error)
    mpcompile(module, **OPTIONS)
    module._compiled_call_impl = None  # plain PyTorch, on purpose
    mpcompile(Calling(), **OPTIONS)
    gc.collect()
