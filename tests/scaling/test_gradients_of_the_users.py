"""Whatever a loop does to `p.grad` in plain PyTorch does the same at O2 with an MPOptimizer: what
is stored there is the gradient, and any FP32 may be stored there.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import COMBINED
from low_gradients import Net, check, inputs, loss, trained
from torch import nn
from torch.optim import Optimizer

from mpcompile import LossScale, MPCompileWarning, MPOptimizer, mpcompile

Loop = Callable[[nn.Module, Optimizer], Any]


def _weight(net: nn.Module) -> Any:
    return net.fc1.weight


def _grads(net: nn.Module) -> list[Any]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def clamp_data(net: nn.Module, _: Optimizer) -> None:
    """The line of PyTorch's DQN tutorial, before it had `clip_grad_value_`."""
    loss(net).backward()
    for grad in _grads(net):
        grad.data.clamp_(-1e-2, 1e-2)


def add_noise_to_data(net: nn.Module, _: Optimizer) -> None:
    loss(net).backward()
    for grad in _grads(net):
        grad.data.add_(torch.full(grad.shape, 1e-2))


def write_by_numpy(net: nn.Module, _: Optimizer) -> None:
    loss(net).backward()
    for p in net.parameters():
        p.grad = p.grad.double() if p.dtype is torch.float64 else p.grad.float()  # type: ignore[union-attr]
        p.grad.numpy()[...] *= 0.5


def fisher(net: nn.Module, _: Optimizer) -> list[Any]:
    """The diagonal of an empirical Fisher matrix, as for elastic weight consolidation."""
    found = [torch.zeros(p.shape, dtype=torch.float64) for p in net.parameters()]
    for rows in (3, 4, 5):
        net.zero_grad()
        loss(net, rows).backward()
        for total, grad in zip(found, _grads(net), strict=True):
            total += grad.double() ** 2 / 3
    return found


def preallocate(net: nn.Module, _: Optimizer) -> None:
    loss(net).backward()  # once before
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    loss(net, 5).backward()


def surgery(net: nn.Module, _: Optimizer) -> None:
    """As PCGrad: a gradient for each task, of which the conflicting part is projected out."""
    both = []
    for rows in (4, 5):
        net.zero_grad()
        loss(net, rows).backward()
        both.append(torch.cat([grad.detach().double().flatten() for grad in _grads(net)]))
    a, b = both
    flat = a - (a @ b).clamp(max=0) / (b @ b) * b + b
    for p, part in zip(
        net.parameters(), flat.split([p.numel() for p in net.parameters()]), strict=True
    ):
        p.grad = part.view(p.shape).to(p.dtype)


def sign(net: nn.Module, _: Optimizer) -> None:
    loss(net).backward()
    for p in net.parameters():
        p.grad = torch.full_like(p, 0.5) * p.grad.abs().amax()  # type: ignore[union-attr]


def clip_norm(net: nn.Module, _: Optimizer) -> Any:
    loss(net).backward()
    return torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-2)


def clip_value(net: nn.Module, _: Optimizer) -> None:
    loss(net).backward()
    torch.nn.utils.clip_grad_value_(net.parameters(), 1e-2)


def halve(net: nn.Module, _: Optimizer) -> None:
    for rows in (3, 4):
        loss(net, rows).backward()
    for grad in _grads(net):
        grad /= 2


def penalty(net: nn.Module, _: Optimizer) -> None:
    loss(net).backward()
    (loss(net, 5) + _weight(net).square().sum()).backward()


def hook(net: nn.Module, _: Optimizer) -> Any:
    seen: list[torch.Tensor] = []
    loss(net).backward()
    handle = _weight(net).register_hook(lambda grad: (seen.append(grad.clone()), 3 * grad)[1])
    loss(net, 5).backward()
    handle.remove()
    return seen


def accumulated(net: nn.Module, _: Optimizer) -> Any:
    seen: list[torch.Tensor] = []
    value = loss(net)
    handle = _weight(net).register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    value.backward()
    handle.remove()
    return seen


def autograd_grad(net: nn.Module, _: Optimizer) -> Any:
    loss(net).backward()
    x = inputs(net).requires_grad_()
    return torch.autograd.grad(net(x).square().mean(), [_weight(net), net.norm.bias, x])  # type: ignore[list-item, union-attr]


LOOPS: list[Loop] = [
    clamp_data, add_noise_to_data, write_by_numpy, fisher, preallocate, surgery, sign, clip_norm,
    clip_value, halve, penalty, hook, accumulated, autograd_grad,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_gradients_and_the_step(loop: Loop, dtype: torch.dtype) -> None:
    """Gradients, what the loop returns of them, and the weights after two steps: as in FP64."""
    model = Net()
    reference = copy.deepcopy(model).double()
    start = [p.detach().clone() for p in reference.parameters()]
    rtol, moves = (1e-2, 1e-2) if dtype is torch.float16 else (2e-2, 4e-2)
    sgd = torch.optim.SGD(reference.parameters(), lr=1e-3)
    runs = ((model, trained(model, dtype=dtype)), (reference, sgd))
    for _ in range(2):
        ours, wanted = (torch.utils._pytree.tree_leaves(loop(net, by)) for net, by in runs)
        for got, right in zip(ours, wanted, strict=True):
            if right is not None:
                assert (got.double() - right).norm() <= rtol * right.norm()
        check(model, reference, rtol)
        for _, optimizer in runs:
            optimizer.step()
            optimizer.zero_grad()
    moved = zip(model.parameters(), reference.parameters(), start, strict=True)
    for name, (p, q, before) in zip(dict(model.named_parameters()), moved, strict=True):
        assert (p.double() - q).norm() <= moves * (q - before).norm() + 1e-7, name


ZEROED: dict[str, Callable[[torch.optim.Optimizer, nn.Module], object]] = {
    "to None": lambda o, m: o.zero_grad(),
    "by the optimizer": lambda o, m: o.zero_grad(set_to_none=False),
    "each, as data": lambda o, m: [g.data.zero_() for g in _grads(m)],
    "new zeros": lambda o, m: [setattr(p, "grad", torch.zeros_like(p)) for p in m.parameters()],
}


@COMBINED
@pytest.mark.parametrize("zero", ZEROED)
def test_small_gradients_move_weights_after_the_scale_has_dipped(zero: str, how: Any) -> None:
    """However gradients are zeroed between the steps: none is a multiple of what it is."""
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    scale = LossScale.dynamic(init_scale=2.0**16, growth_interval=2, min_scale=2.0**-20)
    model = mpcompile(net, loss_scale=scale, **how)
    optimizer = MPOptimizer(torch.optim.SGD(net.parameters(), lr=1e4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MPCompileWarning)  # steps that are skipped, on purpose
        for i in range(34):
            x = torch.randn(8, 16)
            ZEROED[zero](optimizer, net)
            factor = float("inf") if 2 <= i < 14 else 1e-9
            (model(x).pow(2).sum() * factor).backward()
            before = copy.deepcopy(net)
            optimizer.step()
    (before.double()(x.double()).pow(2).sum() * 1e-9).backward()
    moved = net[0].weight.double() - before[0].weight
    wanted = -1e4 * before[0].weight.grad
    assert (moved - wanted).norm() < 0.05 * wanted.norm()
