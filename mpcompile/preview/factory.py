"""`"pkg.module:factory"` -> a model and the arguments of its call, for the command line.

The factory is called without arguments and returns `(model, args)`, `(model, args, kwargs)` or
`(model, args, kwargs, loss_fn)`; the model is then called as `model(*args, **kwargs)`, and
`mpcompile diagnose` makes its loss by `loss_fn(result)`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import MPCompileError, did_you_mean
from .explain import described

CONTRACT = (
    "factory() must return (model, args) or (model, args, kwargs): an nn.Module, the tuple of its "
    "positional arguments, and the dict of the others. `mpcompile diagnose` reads a fourth value: "
    "a function that makes the loss of the model's result"
)


Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], torch.Tensor] | None]
"""What a factory returned: a model, the arguments of its call, and who makes the loss."""


def made_by(target: str) -> Made:
    """Import the factory, whose module may lie in the current directory, and call it.

    Raises:
        MPCompileError: the module or factory doesn't exist, fails, or returns something else.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise MPCompileError(
            f"{target!r}: write the factory as pkg.module:factory{_likely(target)}"
        )
    if module_name.endswith(".py") or "/" in module_name:
        raise MPCompileError(
            f"{target!r}: name the module, not its file{_likely(f'{module_name}.{path}')}"
        )
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise MPCompileError(
                f"there is no module {missing!r} in the current directory or among the installed "
                "packages"
            ) from None
        raise MPCompileError(f"{module_name} can't be imported: {described(error)}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, vars(found))
            raise MPCompileError(f"{module_name} has no {path!r}{hint}")
        found = getattr(found, name)
    if not callable(found) or isinstance(found, nn.Module):
        raise MPCompileError(f"{target} is a {type(found).__name__}, not a function; {CONTRACT}")
    try:
        made = found()
    except Exception as error:
        raise MPCompileError(f"{target}() fails: {described(error)}") from error
    return _checked(target, made)


def _likely(target: str) -> str:
    """`"; did you mean models.gpt:make?"` for `models.gpt.make`, also with the file's name."""
    words = target.removeprefix("./").replace("/", ".").replace(".py.", ".").split(".")
    return f"; did you mean {'.'.join(words[:-1])}:{words[-1]}?" if len(words) > 1 else ""


def _checked(target: str, made: Any) -> Made:
    if not isinstance(made, tuple) or len(made) not in (2, 3, 4):
        what = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise MPCompileError(f"{target}() returned {what}; {CONTRACT}")
    rest: tuple[Any, ...] = ({}, None)
    model, args, kwargs, loss_fn = (*made, *rest[len(made) - 2 :])
    for name, value, right in (
        ("the model", model, isinstance(model, nn.Module)),
        ("args", args, isinstance(args, (tuple, list))),
        ("kwargs", kwargs, isinstance(kwargs, dict)),
        ("loss_fn", loss_fn, loss_fn is None or callable(loss_fn)),
    ):
        if not right:
            raise MPCompileError(
                f"{target}() returned a {type(value).__name__} as {name}; {CONTRACT}"
            )
    return model, tuple(args), kwargs, loss_fn
