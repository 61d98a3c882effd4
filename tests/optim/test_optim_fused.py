"""torch's fused kernels as the update of a step: where they serve, and what must not reach them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW
from twins import Twins

Change = Callable[[dict[str, Any]], object]
momentum = functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True)
dampened = functools.partial(SGD, lr=0.1, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize(
    ("make", "change", "served"),
    [
        (functools.partial(AdamW, lr=0.1, amsgrad=True, maximize=True), dict, True),
        (functools.partial(Adagrad, lr=0.1, lr_decay=0.1), dict, True),
        (momentum, dict, True),
        (dampened, dict, True),  # a kernel that skips the first step would leave no buffer
        (functools.partial(SGD, lr=0.1), lambda group: group.update(momentum=0.9), True),
        (functools.partial(Adam, lr=0.1), lambda group: group.update(lr=torch.tensor(0.2)), False),
    ],
)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_it_steps_and_skips(make: Any, change: Change, served: bool, clip: float | None) -> None:
    """From the first step on. The optimizer and its groups are left as they were."""
    start = [torch.randn(3, 4), torch.randn(5), torch.randn(())]
    twins = Twins(make, start, emit="inductor", max_grad_norm=clip)
    for i, bad in enumerate((True, False, True, False, False)):
        gradients = [torch.randn(p.shape) for p in twins.mine]
        if i == 2:
            for optimizer in twins.both:
                change(optimizer.param_groups[0])
        if bad:
            for p, grad in zip(twins.mine, gradients, strict=True):
                p.grad = grad
            gradients[1][2] = float("inf")
            twins.optimizer.step()
        elif clip is None:
            twins.step(gradients)
        else:
            twins.step_clipped(clip, gradients)
        assert bool(twins.optimizer.skipped) is bad
    twins.agree()
    last: Any = twins.optimizer._last
    assert last.step.traced.fused is served
    assert twins.optimizer.param_groups[0]["fused"] is None
    assert not {"found_inf", "grad_scale"} & vars(twins.optimizer.inner).keys()


def test_what_lies_otherwise_is_traced() -> None:
    """The kernels take memory as it is."""
    last = torch.channels_last
    twins = Twins(
        momentum, [torch.randn(4, 3, 2, 2).contiguous(memory_format=last)], emit="inductor"
    )
    for make in (torch.clone, functools.partial(torch.clone, memory_format=last), torch.clone):
        twins.step([make(torch.randn(4, 3, 2, 2))])
        step: Any = twins.optimizer._last
        assert step.step.traced.fused is (make is not torch.clone)
    twins.agree()


def test_the_strides_of_a_dim_of_one_say_nothing() -> None:
    """A 1x1 convolution's gradient has others there."""
    twins = Twins(momentum, [torch.randn(4, 3, 1, 1)], emit="inductor")
    twins.step([torch.empty_strided((4, 3, 1, 1), (3, 1, 3, 3)).normal_()])
    step: Any = twins.optimizer._last
    assert step.step.traced.fused
    twins.agree()
