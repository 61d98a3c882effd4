"""Gradients of O2's copies agree with FP64's, in whatever order a loop runs things, and while the
loss scale moves or is found.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from low_gradients import HALVES, MATRICES, Net, check, check_against_fp64, inputs, loss, trained
from module_of import module_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompile import LossScale, MPOptimizer, compiled_plans, mpcompile

# -- loops -----------------------------------------------------------------------------------------


def _another_batch_size(net: nn.Module) -> None:
    for rows in (4, 5, 6) * 100:
        loss(net, rows).backward()


def _a_gradient_for_the_input_too(net: nn.Module) -> None:
    x = inputs(net)
    net(x.detach()).square().mean().backward()
    net(x.requires_grad_()).square().mean().backward()


def _zeroed_in_place(net: nn.Module) -> None:
    loss(net).backward()
    net.zero_grad(set_to_none=False)
    (loss(net, 5) + loss(net, 6)).backward()


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


def _called_twice_in_a_backward(net: nn.Module) -> None:
    (net(inputs(net)) * net(inputs(net).neg())).mean().backward()


def _outside(net: nn.Module) -> torch.Tensor:
    return net.fc1.weight.square().sum()  # type: ignore[operator, union-attr]


def _and_outside(net: nn.Module) -> None:
    (loss(net) + _outside(net)).backward()


def _outside_first(net: nn.Module) -> None:
    _outside(net).backward()
    loss(net).backward()
    loss(net).backward()


def _outside_between(net: nn.Module) -> None:
    loss(net).backward()
    _outside(net).backward()
    loss(net).backward()


# Those whose gradients are of one backward -> which of them are sums in FP32 all the same.
ONCE: dict[Callable[[nn.Module], None], set[str]] = {
    _called_twice_in_a_backward: set(), _and_outside: {"fc1.weight"}, _only_some: {"fc2.weight"},
    _a_forward_without_a_backward: set(), _an_error_between: set(),
}  # fmt: skip
LOOPS = [
    _another_batch_size, *ONCE, _outside_first, _outside_between, _a_gradient_for_the_input_too,
    _zeroed_in_place, _evaluations_between, _retained, _checkpointed, _checkpointed_reentrant,
]  # fmt: skip


@pytest.mark.slow_rows("trainings that overflow, against FP64", but=4)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_right(loop: Callable[[nn.Module], None], dtype: torch.dtype) -> None:
    """And stored low where no loss scale multiplies them."""
    model = Net()
    optimizer = trained(model, dtype=dtype)
    stored_low = [name for name in MATRICES if name not in ONCE.get(loop, MATRICES)]
    rtol, low = (1e-2, []) if dtype is torch.float16 else (2e-2, stored_low)
    assert check_against_fp64(model, loop, rtol) == low
    optimizer.step()
    assert not optimizer.skipped


def test_a_parameter_used_twice_in_a_graph() -> None:
    model = module_of(
        lambda self, x: self.fc2(self.fc1(torch.tanh(self.fc1(x)))),
        fc1=nn.Linear(8, 8),
        fc2=nn.Linear(8, 4),
    )
    _optimizer = trained(model)
    assert check_against_fp64(model, _another_batch_size) == []


class Broken(nn.Module):
    """Two graphs that share a weight: the first reads it low, the second low or in FP32."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        torch._dynamo.graph_break()
        if self.second == "low":
            return self.fc(y)
        return y * self.fc.weight.softmax(-1).sum()


@pytest.mark.parametrize("second", ["low", "full"])
def test_two_graphs_that_share_a_weight(second: str) -> None:
    model = Broken(second)
    optimizer = trained(model, fullgraph=False)
    for _ in range(2):
        model.zero_grad()
        check_against_fp64(model, lambda net: loss(net).backward(), 2e-2)
        optimizer.step()


def test_what_is_compiled_while_gradients_are_there_is_one_graph() -> None:
    model = Net()
    _optimizer = trained(model, dtype=torch.bfloat16)
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
    assert check(first, a) == check(second, b) == []
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
        assert check(model, reference) == []
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
    assert check(net, reference) == []


# -- the loss scale moves, or is found ------------------------------------------------------------


def beside_its_reference() -> Any:
    """A scale that moves with each step; (model, optimizer) in FP16, and in FP64."""
    scale = LossScale.dynamic(init_scale=2.0**10, growth_interval=1)
    model = nn.Linear(8, 8)  # its backward reads no weights: they may change in between
    reference = copy.deepcopy(model).double()
    sgd = torch.optim.SGD(reference.parameters(), lr=1e-3)
    return scale, (model, trained(model, scale)), (reference, sgd)


def test_the_scale_may_move_between_a_forward_and_its_backward() -> None:
    scale, (model, optimizer), (reference, sgd) = beside_its_reference()
    for net, stepper in ((model, optimizer), (reference, sgd)):
        first, second = loss(net), loss(net, 5)
        first.backward()
        stepper.step()
        second.backward()  # added to a gradient of the same scale
        loss(net, 6).backward()  # and to one of another
    assert scale.value == 2.0**11
    assert check(model, reference) == []
    for _ in range(2):  # twice the same gradients: the scale moves after the first step
        optimizer.step()
        sgd.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=0, atol=2e-6)


def test_one_backward_over_forwards_of_two_scales() -> None:
    """In the second, the gradient is multiplied by twice as much."""
    scale, (model, optimizer), (reference, sgd) = beside_its_reference()
    for net, stepper in ((model, optimizer), (reference, sgd)):
        first = loss(net)
        loss(net, 5).backward()
        stepper.step()
        stepper.zero_grad()
        (first + loss(net, 6)).backward()
    assert scale.value == 2.0**11
    assert check(model, reference) == []


def test_two_models_of_one_scale_and_an_optimizer_each() -> None:
    """D's step moves the scale between G's forward and backward."""
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
            assert check(net, reference) == []
    for net, reference in zip(models, references, strict=True):
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.double(), q, rtol=0, atol=2e-6)


@pytest.mark.parametrize("factor", [1e30, float("inf")])
def test_gradients_meet_those_of_a_search_for_the_scale_that_failed(factor: float) -> None:
    """What is finite of them stays true to size."""
    reference = module_of(
        lambda m, x: (m.fc1(x), m.fc2(x)), fc1=nn.Linear(8, 4), fc2=nn.Linear(8, 4)
    )
    model = copy.deepcopy(reference)
    optimizer = trained(model, LossScale.dynamic(min_scale=1.0, max_scale=2.0**11))
    for net in (reference, model):
        first, second = net(inputs(net))
        (first.sum() + (second * factor).sum()).backward()
        first, second = net(inputs(net, rows=3))
        ((first * 64).sum() + (second * 1024).sum()).backward()
    ours, wanted = model.fc1.weight.grad, reference.fc1.weight.grad
    assert (ours - wanted).norm() <= 1e-2 * wanted.norm()
    optimizer.step()  # skipped: the first backward overflowed
    assert torch.equal(model.fc1.weight, reference.fc1.weight)
