"""Gradients of O2 in FP16 agree with FP32's while the loss scale moves or is found."""

import copy

import pytest
import torch
from low_gradients import Net, check, inputs, loss, trained
from module_of import module_of
from torch import nn

from mpcompile import LossScale


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
    assert check(model, reference) == []
    for _ in range(2):  # twice the same gradients: the scale moves after the first step
        optimizer.step()
        sgd.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=0, atol=2e-6)


def test_one_backward_over_forwards_of_two_scales() -> None:
    """In the second, the gradient is multiplied by twice as much."""
    model = nn.Linear(8, 8)  # its backward reads no weights: they may change in between
    reference = copy.deepcopy(model).double()
    scale = LossScale.dynamic(init_scale=2.0**10, growth_interval=1)
    optimizer = trained(model, scale)
    sgd = torch.optim.SGD(reference.parameters(), lr=1e-3)
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
