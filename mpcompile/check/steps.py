"""The training steps that `mpcompile check` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ..scaling.loss_scale import LossScale
from . import models
from .sides import Results, Side

__all__ = [
    "data_parallel",
    "method",
    "skipped",
    "skipped_by_mp_optimizer",
    "trained",
    "whole",
    "whole_with_lr",
]

_ROWS = (8, 6)
_START = 2.0**10  # a loss scale
_BEYOND = 1e30  # times a loss: beyond FP16 at any scale


def trained(
    side: Side, net: nn.Module, sizes: Sequence[tuple[int, ...]], *, generated: bool = False
) -> Results:
    """Train with a batch of each size; `generated`: by an MPOptimizer."""
    model = side.model(net)
    optimizer = side.optimizer(_sgd(net)) if generated else _sgd(net)
    return _steps(side, model, optimizer, sizes)


def method(side: Side) -> Results:
    """Train a model of which one method is compiled."""
    net = models.Layers()
    plain = side.plain(net)
    compiled = side.compiled(net.call)
    net.call = lambda part, x: compiled(part, x)  # type: ignore[method-assign]
    return _steps(side, plain, _sgd(net), [(8, 6), (5, 6), (7, 6)])


def skipped(side: Side) -> Results:
    """Train; the second of three steps overflows."""
    return _skipped(side, _sgd)


def skipped_by_mp_optimizer(side: Side) -> Results:
    """The same with an `MPOptimizer`."""
    return _skipped(side, lambda net: side.optimizer(_sgd(net)))


def whole(side: Side) -> Results:
    """A function that trains: forward, backward, step."""
    return _whole(side, lambda optimizer: None)


def whole_with_lr(side: Side) -> Results:
    """The same; it also sets the learning rate, between backward and step."""

    def halve(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    return _whole(side, halve)


def data_parallel(side: Side) -> Results:
    """Train in a group of one process."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        net = models.layers()
        return _steps(side, DistributedDataParallel(side.model(net)), _sgd(net), [_ROWS] * 2)
    finally:
        dist.destroy_process_group()


def _sgd(net: nn.Module) -> Optimizer:
    return SGD(net.parameters(), lr=0.1, momentum=0.9)


def _steps(
    side: Side, model: nn.Module, optimizer: Optimizer, sizes: Sequence[tuple[int, ...]]
) -> Results:
    """A step for each size. All losses, and how far each parameter moved."""
    start = _values(model)
    losses = []
    for size in sizes:
        optimizer.zero_grad()
        loss = model(side.random(*size)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *_moved(model, start)]


def _skipped(side: Side, made: Callable[[nn.Module], Optimizer]) -> Results:
    scale = LossScale.dynamic(_START)
    net = models.layers()
    model = side.model(net, loss_scale=scale)
    optimizer, start = made(net), _values(net)
    for factor in (1.0, _BEYOND, 1.0):
        before = _values(net)
        loss = model(side.random(*_ROWS)).square().mean() * factor
        if side.exact and factor == _BEYOND:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if factor == _BEYOND:
            assert all(map(torch.equal, before, _values(net))), "the step was taken"
    model(side.random(*_ROWS))  # the scale moves with a forward
    assert side.exact or scale.value == _START / 2, f"the scale is {scale.value:g}"
    assert side.exact or scale.skipped_steps == 1, f"skipped: {scale.skipped_steps}"
    return _moved(net, start)


def _whole(side: Side, before_step: Callable[[Optimizer], None]) -> Results:
    net = models.layers()
    model = side.plain(net)
    optimizer, start = _sgd(net), _values(net)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        before_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = side.compiled(step)
    losses = [compiled(side.random(*_ROWS)) for _ in range(4)]
    return [*losses, *_moved(net, start)]


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _moved(model: nn.Module, start: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [now - then for now, then in zip(_values(model), start, strict=True)]
