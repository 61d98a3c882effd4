"""Refuses what `diagnose` and `calibrate` can't work with, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import MPCompileError

__all__ = ["check_loss_fn", "check_trained"]


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
