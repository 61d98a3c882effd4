"""What else reads or adds to the gradients that O2 stores in FP16: hooks, `autograd.grad`, terms
of the loss outside of the model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from low_gradients import MATRICES, Net, check, inputs, loss, trained
from torch import nn

from mpcompile import MPCompileError


def _a_penalty(net: nn.Module) -> torch.Tensor:
    weight: Any = net.fc1.weight
    value: torch.Tensor = weight.square().sum()
    return value


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
