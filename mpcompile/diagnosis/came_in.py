"""What a step was given that is not finite: then no operator is at fault."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..scaling.messages import is_bad
from ..torch_inside.names import pytree
from .sides import Sides

__all__ = ["not_finite_in"]


def not_finite_in(sides: Sides) -> Iterator[str]:
    """A sentence for each kind of thing that holds NaN or infinity before anything runs."""
    args, kwargs = sides.call
    names = list(inspect.signature(sides.twin.forward).bind(*args, **kwargs).arguments.items())
    given = _bad(dict(names))
    if given:
        yield f"the inputs hold NaN or infinity ({', '.join(given)}): look at the data"
    held = [name for name, x in _tensors_of(sides.twin) if is_bad(x)]
    if held:
        yield f"parameters or buffers hold NaN or infinity: {', '.join(held)}"
    targets = _bad(_read_by(sides.loss))
    if targets:
        yield f"loss_fn reads NaN or infinity ({', '.join(targets)}): look at the targets"


def _bad(values: dict[str, Any]) -> list[str]:
    """The names of what isn't finite, as a program writes them: `x`, `kwargs['mask']`."""
    return [
        name + pytree.keystr(path)
        for name, value in values.items()
        for path, part in pytree.tree_flatten_with_path(value)[0]
        if is_bad(part)
    ]


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


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
