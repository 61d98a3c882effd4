"""A training step for those who need no function of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from .api import mpcompile
from .errors import MPCompileError, kind_of
from .runtime.records import records
from .settings import Options
from .torch_inside.optimizers import needs_closure


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
        **options: of `mpcompile()`; those that aren't given are the model's, if it is compiled.

    Returns:
        `step(*inputs, target) -> loss`: 0-d, detached. It leaves no gradients behind.

    Raises:
        MPCompileError: a bad argument, or an optimizer of another model; by the step: a batch that
            can't be split, or a loss that is no scalar with a gradient.
    """
    _check(model, optimizer, loss_fn, accumulate)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        parts = _split(batch, accumulate)
        total = None
        for part in parts:
            loss = _checked(loss_fn(model(*part[:-1]), part[-1]))
            loss = loss / accumulate if accumulate > 1 else loss
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        assert total is not None
        return total

    known = records.get(model)
    like_model = dict(known.request) if known is not None else {}
    compiled: Callable[..., torch.Tensor] = mpcompile(step, **{**like_model, **options})
    return compiled


def _check(model: Any, optimizer: Any, loss_fn: Any, accumulate: Any) -> None:
    found = f"train_step({kind_of(model)}, {kind_of(optimizer)}, ...)"
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise MPCompileError(f"{found}: give an nn.Module and an optimizer")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise MPCompileError(
            f"{found}: the optimizer holds no parameter of the model, and would train nothing; "
            "make it of model.parameters()"
        )
    if needs_closure(type(optimizer)):
        raise MPCompileError(
            f"{found}: {type(optimizer).__name__} runs the model inside of its step; write the "
            "step yourself, optimizer.step(closure)"
        )
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise MPCompileError(f"train_step: {name} is a class; give an instance, {name}()")
    if not callable(loss_fn):
        raise MPCompileError(f"train_step: loss_fn={loss_fn!r} is not callable")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise MPCompileError(f"train_step: accumulate={accumulate!r}; give 1 or more")


def _split(batch: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    if len(batch) < 2:
        given = f"step({', '.join(map(kind_of, batch))})"
        raise MPCompileError(
            f"{given}: give the model's inputs and, last, the target, as step(x, y); of a tuple, "
            "step(*batch)"
        )
    if count == 1:
        return [batch]
    for one in batch:
        if not isinstance(one, torch.Tensor) or one.dim() == 0:
            what = "a number" if isinstance(one, torch.Tensor) else f"a {kind_of(one)}"
            raise MPCompileError(
                f"train_step: accumulate={count} splits each argument along its dim 0, and can't "
                f"split {what}; write such a step yourself"
            )
    sizes = [len(one) for one in batch]
    if len(set(sizes)) > 1:
        rows = ", ".join(map(str, sizes))
        raise MPCompileError(
            f"train_step: accumulate={count} splits all arguments alike along dim 0, and they have "
            f"{rows} rows"
        )
    if sizes[0] % count:
        raise MPCompileError(
            f"train_step: accumulate={count} can't split a batch of {sizes[0]} into equal parts: "
            f"give batches of a multiple of {count} (drop_last=True of a DataLoader drops the rest)"
        )
    return list(zip(*(one.chunk(count) for one in batch), strict=True))


def _checked(loss: Any) -> torch.Tensor:
    """The loss, if one can go backward from it."""
    if not isinstance(loss, torch.Tensor):
        raise MPCompileError(f"train_step: loss_fn returned a {kind_of(loss)}, not a tensor")
    if loss.numel() != 1:
        raise MPCompileError(
            f"train_step: loss_fn returned a tensor of shape {tuple(loss.shape)}; give one number, "
            'such as its mean (reduction="mean")'
        )
    if not loss.requires_grad:
        raise MPCompileError(
            "train_step: the loss has no gradient: it doesn't depend on a trained parameter (was "
            "it detached? are all of them frozen? is it under torch.no_grad()?)"
        )
    return loss
