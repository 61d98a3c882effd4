"""Refuses what `diagnose` and `calibrate` can't work with, before anything runs; and says what a
step was given that is not finite: then no operator is at fault.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import MPCompileError
from ..torch_inside.names import pytree
from ..torch_inside.optimizers import needs_closure
from ..torch_inside.tensors import is_bad
from .sides import Sides


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
    if optimizer is None:
        return None
    inner = getattr(optimizer, "inner", None)  # an `MPOptimizer`'s, over the same groups
    same = getattr(inner, "param_groups", None) is getattr(optimizer, "param_groups", inner)
    optimizer = inner if isinstance(inner, torch.optim.Optimizer) and same else optimizer
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


def not_finite_in(sides: Sides) -> Iterator[str]:
    """A sentence for each kind of thing that holds NaN or infinity before anything runs."""
    args, kwargs = sides.call
    if given := _bad(inspect.signature(sides.twin.forward).bind(*args, **kwargs).arguments):
        yield f"the inputs hold NaN or infinity ({', '.join(given)}): look at the data"
    tensors = itertools.chain(sides.twin.named_parameters(), sides.twin.named_buffers())
    if held := [name for name, x in tensors if is_bad(x)]:
        yield f"parameters or buffers hold NaN or infinity: {', '.join(held)}"
    if targets := _bad(_read_by(sides.loss)):
        yield f"loss_fn reads NaN or infinity ({', '.join(targets)}): look at the targets"


def _bad(values: dict[str, Any]) -> list[str]:
    """The names of what isn't finite, as a program writes them: `x`, `kwargs['mask']`."""
    return [
        name + pytree.keystr(path)
        for name, value in values.items()
        for path, part in pytree.tree_flatten_with_path(value)[0]
        if is_bad(part)
    ]


def _read_by(function: Callable[..., Any]) -> dict[str, Any]:
    """The values that a function has besides its arguments, as far as Python tells."""
    if isinstance(function, functools.partial):
        bound = {f"args[{i}]": x for i, x in enumerate(function.args)}
        return {**bound, **function.keywords, **_read_by(function.func)}
    if not inspect.isfunction(function):
        return {}
    found = inspect.getclosurevars(function)
    return {
        name: value
        for name, value in {**found.globals, **found.nonlocals}.items()
        if not isinstance(value, nn.Module)
    }
