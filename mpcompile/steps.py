"""A training step for those who need no function of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from .api import mpcompile
from .errors import MPCompileError
from .settings import Options


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., torch.Tensor],
    *,
    accumulate: int = 1,
    **options: Unpack[Options],
) -> Callable[..., torch.Tensor]:
    """A training step as one compiled function: forward, loss, backward, step, zero_grad.

        step = train_step(model, optimizer, F.cross_entropy, level="O2")
        loss = step(x, y)

    Args:
        model: called with all arguments of the step but the last.
        optimizer: a torch.optim optimizer or an `MPOptimizer` over the model's parameters.
        loss_fn: called with what the model returns and the last argument; returns a scalar.
        accumulate: split each batch along dim 0 into so many equal parts, one forward and backward
            each; the loss is the mean of theirs. Needs memory for one part's activations only.
        **options: of `mpcompile()`.

    Returns:
        `step(*inputs, target) -> loss`: 0-d, detached. It leaves no gradients behind.

    Raises:
        MPCompileError: a bad argument, or a model that `mpcompile()` has compiled already; by the
            step: a batch that can't be split.
    """
    _check(model, optimizer, loss_fn, accumulate)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        parts = _split(batch, accumulate)
        total = None
        for part in parts:
            loss = loss_fn(model(*part[:-1]), part[-1])
            loss = loss / accumulate if accumulate > 1 else loss
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        assert total is not None
        return total

    compiled: Callable[..., torch.Tensor] = mpcompile(step, **options)
    return compiled


def _check(model: Any, optimizer: Any, loss_fn: Any, accumulate: Any) -> None:
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        found = f"{type(model).__name__}, {type(optimizer).__name__}"
        raise MPCompileError(f"train_step({found}, ...): give an nn.Module and an optimizer")
    if not callable(loss_fn):
        raise MPCompileError(f"train_step: loss_fn={loss_fn!r} is not callable")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise MPCompileError(f"train_step: accumulate={accumulate!r}; give 1 or more")


def _split(batch: tuple[torch.Tensor, ...], count: int) -> list[tuple[torch.Tensor, ...]]:
    if count == 1:
        return [batch]
    if len({len(one) for one in batch}) > 1 or len(batch[0]) % count:
        sizes = ", ".join(str(len(one)) for one in batch)
        raise MPCompileError(f"train_step: accumulate={count} can't split a batch of {sizes}")
    return list(zip(*(one.chunk(count) for one in batch), strict=True))
