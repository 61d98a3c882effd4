"""Refuses what `diagnose` and `calibrate` can't work with, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import MPCompileError
from ..optim import MPOptimizer
from ..optim.checks import needs_closure


def check_trained(model: nn.Module, who: str) -> None:
    """Raise if no parameter is trained: there is no backward to look at."""
    if not any(p.requires_grad for p in model.parameters()):
        raise MPCompileError(
            f"{who}: no parameter of {type(model).__name__} requires a gradient, so there is no "
            "training step to take"
        )


def check_loss_fn(loss_fn: Callable[..., Any] | None, takes: str, example: str) -> None:
    """Raise if the function can't be called with what it will get.

    Args:
        loss_fn: the user's, or None.
        takes: the names of its arguments: `"model, batch"`.
        example: one that would do.
    """
    if loss_fn is None:
        return
    wanted = f"loss_fn is called as loss_fn({takes}), as in `{example}`"
    if not callable(loss_fn):
        raise MPCompileError(f"loss_fn={loss_fn!r} is not a function; {wanted}")
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # a builtin that does not tell
        return
    try:
        signature.bind(*takes.split(", "))
    except TypeError as error:
        raise MPCompileError(f"{wanted}, and this one takes {signature}: {error}") from None


def check_optimizer(optimizer: object, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer that takes the steps: that inside of an `MPOptimizer`.

    Raises:
        MPCompileError: it is no optimizer, needs a closure, or holds no parameter of the model.
    """
    if isinstance(optimizer, MPOptimizer):
        optimizer = optimizer.inner
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MPCompileError(f"optimizer={optimizer!r}: give a torch.optim.Optimizer")
    name = type(optimizer).__name__
    if needs_closure(type(optimizer)):
        raise MPCompileError(
            f"{name} runs the model again inside of its step: leave `optimizer` out, or give "
            "another"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise MPCompileError(f"{name} holds no parameter of {type(model).__name__}")
    return optimizer
