"""How O2's gradients are stored: in whatever order a loop runs things, they are FP32's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompile import LossScale, MPCompileError, MPOptimizer, compiled_plans, mpcompile
from mpcompile.state.copies import copies_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(F.gelu(self.norm(self.fc1(x))))
        return y


class Twice(nn.Module):
    """One parameter used twice in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(self.fc1(torch.tanh(self.fc1(x))))
        return y


def trained(model: nn.Module, scale: LossScale | None = None, **options: Any) -> MPOptimizer:
    """Compile the model in place, in FP16 and without breaks, and hold it."""
    scale = scale or LossScale.dynamic(init_scale=2.0**10)
    options = {"emit": "eager", "fullgraph": True, "loss_scale": scale, **options}
    mpcompile(model, level="O2", dtype=torch.float16, **options)
    return MPOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), emit="eager")


def true(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter, true to size."""
    if p.grad is None or p.grad.dtype is not torch.float16:
        return p.grad
    (kept,) = copies_of(p).values()
    assert kept.gradient.stored is not None
    return p.grad.double() / kept.gradient.stored.by


def check(model: nn.Module, reference: nn.Module) -> list[str]:
    """Compare the gradients of two models. Returns the names of those that are stored low."""
    low = []
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        ours, wanted = true(p), q.grad
        assert (ours is None) == (wanted is None), name
        if ours is not None and wanted is not None:
            assert (ours - wanted).norm() <= 1e-2 * wanted.norm(), name
            assert p.grad is not None
            low += [name] if p.grad.dtype is torch.float16 else []
    return low


MATRICES = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]  # all that has a copy


def inputs(net: nn.Module, rows: int = 4) -> torch.Tensor:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
    return x.to(next(net.parameters()).dtype)


def loss(net: nn.Module, rows: int = 4) -> torch.Tensor:
    value: torch.Tensor = net(inputs(net, rows)).square().mean()
    return value


# -- everything of ours passes ---------------------------------------------------------------------


def _another_batch_size(net: nn.Module) -> None:
    for rows in (4, 5, 6):
        loss(net, rows).backward()


def _a_gradient_for_the_input_too(net: nn.Module) -> None:
    x = inputs(net)
    net(x.detach()).square().mean().backward()
    net(x.requires_grad_()).square().mean().backward()


def _zeroed_in_place(net: nn.Module) -> None:
    loss(net).backward()
    net.zero_grad(set_to_none=False)
    (loss(net, 5) + loss(net, 6)).backward()


def _a_penalty(net: nn.Module) -> torch.Tensor:
    weight: Any = net.fc1.weight
    value: torch.Tensor = weight.square().sum()
    return value


def _evaluations_between(net: nn.Module) -> None:
    first = loss(net)
    with torch.no_grad():
        loss(net, 5)
    net.eval()
    loss(net)
    net.train()
    first.backward()
    with torch.no_grad():
        loss(net, 6)
    loss(net).backward()


def _a_forward_without_a_backward(net: nn.Module) -> None:
    loss(net)
    loss(net, 5)
    loss(net).backward()


def _an_error_between(net: nn.Module) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    for where in ("output", "input"):
        x = inputs(net).requires_grad_()
        y = net(x)
        (x if where == "input" else y).register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            y.square().mean().backward()
    net.zero_grad()
    loss(net).backward()


def _retained(net: nn.Module) -> None:
    value = loss(net)
    value.backward(retain_graph=True)
    value.backward()


def _checkpointed(net: nn.Module, reentrant: bool = False) -> None:
    x = inputs(net).requires_grad_()
    net(x)  # what is saved while compiling is not saved again
    for _ in range(2):
        checkpoint(net, x, use_reentrant=reentrant).square().mean().backward()
    (net(x).mean() + checkpoint(net, x, use_reentrant=reentrant).square().mean()).backward()


def _checkpointed_reentrant(net: nn.Module) -> None:
    _checkpointed(net, reentrant=True)


def _only_some(net: nn.Module) -> None:
    loss(net).backward(inputs=[net.fc2.weight, net.norm.bias])  # type: ignore[union-attr, list-item]
    loss(net).backward()


LOOPS = [
    _another_batch_size, _a_gradient_for_the_input_too, _zeroed_in_place, _evaluations_between,
    _a_forward_without_a_backward, _an_error_between, _retained, _checkpointed,
    _checkpointed_reentrant, _only_some,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__.strip("_"))
def test_gradients_are_right_and_stored_low(loop: Callable[[nn.Module], None]) -> None:
    model = Net()
    reference = copy.deepcopy(model).double()
    optimizer = trained(model)
    loop(model)
    loop(reference)
    assert check(model, reference) == MATRICES
    optimizer.step()
    assert not optimizer.skipped


def test_the_compiled_backward_may_be_retained() -> None:
    model = Net()
    reference = copy.deepcopy(model).double()
    optimizer = trained(model, emit="aot_eager")
    _retained(model)
    _retained(reference)
    assert check(model, reference) == MATRICES
    optimizer.step()


def test_a_parameter_used_twice_in_a_graph() -> None:
    model = Twice()
    reference = copy.deepcopy(model).double()
    _optimizer = trained(model)
    _another_batch_size(model)
    _another_batch_size(reference)
    assert check(model, reference) == MATRICES


def test_what_is_compiled_while_gradients_are_there_is_one_graph() -> None:
    model = Net()
    _optimizer = trained(model)
    _a_gradient_for_the_input_too(model)
    assert len(compiled_plans(model)) == 2


def test_two_models_that_share_a_parameter_and_a_scale() -> None:
    def pair() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        a, b = Net(), Net()
        b.fc1.weight = a.fc1.weight
        return a, b

    def run(a: nn.Module, b: nn.Module) -> None:
        (loss(a) * loss(b, 5)).backward()
        loss(b).backward()
        loss(a, 6).backward()

    first, second = pair()
    scale = LossScale.dynamic(init_scale=2.0**10)
    kwargs: dict[str, Any] = {"dtype": torch.float16, "emit": "eager", "loss_scale": scale}
    for net in (first, second):
        mpcompile(net, level="O2", **kwargs)
    parameters = {id(p): p for net in (first, second) for p in net.parameters()}
    optimizer = MPOptimizer(torch.optim.SGD(parameters.values(), lr=1e-3), emit="eager")
    run(first, second)
    a, b = (net.double() for net in pair())
    run(a, b)
    assert check(first, a) == check(second, b) == MATRICES
    optimizer.step()


@pytest.mark.parametrize("frozen", ["fc1.weight", "fc2", ""])
def test_parts_frozen_and_thawed(frozen: str) -> None:
    model = Net()
    reference = copy.deepcopy(model).double()
    optimizer = trained(model)
    for trains in (True, False, True):
        for net in (model, reference):
            net.zero_grad()
            part: Any = net
            for name in filter(None, frozen.split(".")):
                part = getattr(part, name)
            part.requires_grad_(trains)
            net(inputs(net).requires_grad_()).square().mean().backward()
        assert len(check(model, reference)) == 4 if trains else len(check(model, reference)) < 4
    optimizer.step()


def test_frozen_and_thawed_through_the_backend() -> None:
    """Nothing hands the graph of the frozen model the scale of the other."""
    net = Net()
    reference = copy.deepcopy(net).double()
    _optimizer = MPOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), emit="eager")
    options = {"dtype": torch.float16, "level": "O2", "emit": "eager"}
    model = torch.compile(net, backend="mpcompile", options=options)
    for module, run in ((net, model), (reference, reference)):
        for trains in (True, False, True):
            module.requires_grad_(trains)
            run(inputs(module).requires_grad_()).square().mean().backward()
    assert check(net, reference) == MATRICES


# -- when the loss scale moves ---------------------------------------------------------------------


def test_the_scale_may_move_between_a_forward_and_its_backward() -> None:
    model = nn.Linear(8, 8)  # its backward reads no weights: they may change in between
    reference = copy.deepcopy(model).double()
    scale = LossScale.dynamic(init_scale=2.0**10, growth_interval=1)
    optimizer = trained(model, scale)
    sgd = torch.optim.SGD(reference.parameters(), lr=1e-3)
    for net, stepper in ((model, optimizer), (reference, sgd)):
        first, second = loss(net), loss(net, 5)
        first.backward()
        stepper.step()
        second.backward()  # added to a gradient of the same scale
        loss(net, 6).backward()  # and to one of another
    assert scale.value == 2.0**11
    assert check(model, reference) == ["weight", "bias"]
    for _ in range(2):  # twice the same gradients: the scale moves after the first step
        optimizer.step()
        sgd.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=0, atol=2e-6)


def test_two_models_of_one_scale_and_an_optimizer_each() -> None:
    """D's step moves the scale between G's forward and backward."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), Net()
    scale = LossScale.dynamic(init_scale=2.0**10, growth_interval=1)
    models, references = copy.deepcopy(start), [net.double() for net in copy.deepcopy(start)]
    ours = [trained(net, scale) for net in models]
    theirs = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in references]
    for _ in range(2):
        for (g, d), steppers in ((models, ours), (references, theirs)):
            for stepper in steppers:
                stepper.zero_grad()
            fake = g(inputs(g))
            (loss(d, 5) - d(fake.detach()).mean()).backward()
            steppers[1].step()
            d(fake).mean().backward()
            steppers[0].step()
        for net, reference in zip(models, references, strict=True):
            assert len(check(net, reference)) == 4
    for net, reference in zip(models, references, strict=True):
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.double(), q, rtol=0, atol=2e-6)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc1(x), self.fc2(x)


@pytest.mark.parametrize("factor", [1e30, float("inf")])
def test_gradients_meet_those_of_a_search_for_the_scale_that_failed(factor: float) -> None:
    """What is finite of them stays true to size, and the search that finds the scale later writes
    to no number that they are stored with.
    """
    torch.manual_seed(0)
    reference = Branches()
    model = copy.deepcopy(reference)
    optimizer = trained(model, LossScale.dynamic(min_scale=1.0, max_scale=2.0**11))
    for net in (reference, model):
        first, second = net(inputs(net))
        (first.sum() + (second * factor).sum()).backward()
        first, second = net(inputs(net, rows=3))
        ((first * 64).sum() + (second * 1024).sum()).backward()
    assert model.fc1.weight.grad.dtype is torch.float16  # stored low, for an MPOptimizer
    ours, wanted = true(model.fc1.weight), reference.fc1.weight.grad
    assert ours is not None
    assert wanted is not None
    assert (ours - wanted).norm() <= 1e-2 * wanted.norm()
    optimizer.step()  # skipped: the first backward overflowed
    assert torch.equal(model.fc1.weight, reference.fc1.weight)


# -- who else looks at a gradient gets a true one --------------------------------------------------


@pytest.mark.parametrize("when", ["before the forward", "before the backward"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_true_gradients(kind: str, when: str) -> None:
    model = Net()
    reference = copy.deepcopy(model).double()
    optimizer = trained(model)
    seen: list[torch.Tensor] = []
    for net in (model, reference):
        weight: Any = net.fc1.weight

        def note(x: torch.Tensor) -> None:
            grad = x.grad if isinstance(x, nn.Parameter) else x
            assert grad is not None
            seen.append(grad.clone())

        loss(net, 5).backward()  # stored low: nobody looks yet
        value = loss(net) if when == "before the backward" else None
        handle = getattr(weight, kind)(note)
        (loss(net) if value is None else value).backward()
        handle.remove()
    got, wanted = seen
    assert got.dtype is torch.float32
    assert (got - wanted).norm() <= 1e-2 * wanted.norm()
    assert check(model, reference) == [n for n in MATRICES if n != "fc1.weight"]
    optimizer.step()
    optimizer.zero_grad()
    loss(model).backward()
    assert model.fc1.weight.grad.dtype is torch.float16  # type: ignore[union-attr]


def test_a_hook_may_change_the_gradient() -> None:
    model = Net()
    reference = copy.deepcopy(model).double()
    optimizer = trained(model)
    for net in (model, reference):
        net.fc1.weight.register_hook(lambda grad: 3 * grad)  # type: ignore[operator, union-attr]
        loss(net).backward()
    assert len(check(model, reference)) == 3
    optimizer.step()


def test_autograd_grad_returns_true_gradients() -> None:
    model = Net()
    reference = copy.deepcopy(model).double()
    optimizer = trained(model)
    found: list[tuple[torch.Tensor, ...]] = []
    for net in (model, reference):
        loss(net).backward()
        x = inputs(net).requires_grad_()
        wanted: list[Any] = [net.fc1.weight, net.norm.bias, x]  # type: ignore[union-attr]
        found.append(torch.autograd.grad(net(x).square().mean(), wanted))
        loss(net, 5).backward()
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype is torch.float32
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()
    assert check(model, reference) == MATRICES
    optimizer.step()


@pytest.mark.parametrize("widened", [True, False])
def test_a_change_of_a_scaled_gradient_is_refused_when_more_is_added(widened: bool) -> None:
    model = Net()
    _optimizer = trained(model)
    loss(model).backward()
    model.fc1.weight.grad.clamp_(-1, 1)  # type: ignore[union-attr]
    with pytest.raises(MPCompileError, match="was changed"):
        (loss(model) + _a_penalty(model) if widened else loss(model)).backward()


def test_a_gradient_that_was_zeroed_may_be_widened() -> None:
    model = Net()
    reference = copy.deepcopy(model).double()
    optimizer = trained(model)
    for net in (model, reference):
        loss(net).backward()
        net.zero_grad(set_to_none=False)
        (loss(net, 5) + _a_penalty(net)).backward()
    assert check(model, reference) == [n for n in MATRICES if n != "fc1.weight"]
    optimizer.step()


# -- memory ----------------------------------------------------------------------------------------


def test_a_trained_model_is_freed() -> None:
    model = Net()
    optimizer = trained(model)
    loss(model).backward()
    optimizer.step()
    alive = weakref.ref(model.fc1.weight)
    del model, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def test_a_failed_backward_leaves_no_gradient_behind() -> None:
    model = Net()
    _optimizer = trained(model)
    _an_error_between(model)
    kept = [k for p in model.parameters() for k in copies_of(p).values()]
    assert len(kept) == 4
    assert not any(k.gradient._aside for k in kept)
