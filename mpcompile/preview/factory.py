"""`"pkg.module:factory"` -> a model and the arguments of its call, for the command line.

The factory is called without arguments and returns `(model, args)` or `(model, args, kwargs)`; the
model is then called as `model(*args, **kwargs)`.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from ..errors import MPCompileError, did_you_mean
from .failures import described

__all__ = ["CONTRACT", "made_by"]

CONTRACT = (
    "factory() must return (model, args) or (model, args, kwargs): an nn.Module, the tuple of its "
    "positional arguments, and the dict of the others"
)


def made_by(target: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Import the factory and call it.

    Raises:
        MPCompileError: the module or factory doesn't exist, fails, or returns something else.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise MPCompileError(f"{target!r}: write the factory as pkg.module:factory")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{module_name}.".startswith(f"{missing}."):
            raise MPCompileError(
                f"there is no module {missing!r} in the current directory or among the installed "
                "packages"
            ) from None
        raise MPCompileError(f"{module_name} can't be imported: {described(error)}") from error
    except Exception as error:
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


def _checked(target: str, made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        what = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise MPCompileError(f"{target}() returned {what}; {CONTRACT}")
    model, args, kwargs = (*made, {})[:3]
    wanted = {"the model": nn.Module, "args": (tuple, list), "kwargs": dict}
    for (name, kind), value in zip(wanted.items(), (model, args, kwargs), strict=True):
        if not isinstance(value, kind):  # type: ignore[arg-type]
            raise MPCompileError(
                f"{target}() returned a {type(value).__name__} as {name}; {CONTRACT}"
            )
    return model, tuple(args), kwargs
