"""How a private name of torch is taken: one that is gone raises when it is used, not on import.

    backward = private(
        "torch._dynamo.variables:TensorVariable.method_backward",
        "notes that the traced function went backward",
        Part.WHOLE_STEP,
    )

The import of mpcompile never fails for such a name. `NAMES` lists all that were taken so far.
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import CannotRewrite, MPCompileError

__all__ = ["GONE", "NAMES", "MissingInTorch", "Name", "Part", "attribute", "private", "take_all"]


class Part(enum.Enum):
    """What can't do without a name; the value says what happens where the name is gone."""

    COMPILE = "nothing is compiled: mpcompile() raises"
    INDUCTOR = 'emit="inductor" raises; emit="aot_eager" does without'
    WHOLE_STEP = "training steps are not one graph: their parts are compiled apart"
    OPTIMIZER = "MPOptimizer raises; plain optimizers do without"
    RECURRENT = "graphs with recurrent layers stay in FP32"
    RANKS = "models of several processes are refused"
    EXPLAIN = "explain, diagnose and plans raise"
    CALLS = "compiled optimizer steps and training steps take some microseconds more"
    SAY = "a message says less"


class MissingInTorch(CannotRewrite, MPCompileError):
    """A private name that this release of torch lacks; the message says which, and what for.

    A reason to do without, where there is a way to; an error for the user everywhere else.
    """


@dataclass(frozen=True)
class Name:
    """One private name of torch's.

    Attributes:
        path: `"torch._dynamo.variables:TensorVariable.method_backward"`.
        why: what it is for, as a phrase.
        part: what can't do without it.
        others: what other releases call it.
        taken: whether it is taken once, by its path; else it is read where it is used.
    """

    path: str
    why: str
    part: Part
    others: tuple[str, ...] = ()
    taken: bool = True


NAMES: dict[str, Name] = {}
"""All names that were taken or noted so far, by their paths."""

GONE: list[Name] = []
"""Those of them that this torch lacks, as was seen when they were taken."""


def private(path: str, why: str, part: Part, *others: str) -> Any:
    """A private name of torch's; one that raises `MissingInTorch` when it is used if it is gone.

    Args:
        path: `"module:name"`, or `"module:Class.name"`.
        why: what it is for, as a phrase.
        part: what can't do without it.
        *others: what other releases call it, in the order to try them.
    """
    name = NAMES[path] = Name(path, why, part, others)
    for candidate in (path, *others):
        try:
            return _resolved(candidate)
        except (ImportError, AttributeError):
            continue
    GONE.append(name)
    return _Absent(path, (), {"_why": why})


def attribute(path: str, why: str, part: Part) -> None:
    """Note a name that can't be taken by its path, such as an attribute of an object, for the page
    of names. `tests/torch_inside/test_attributes.py` tries it.
    """
    NAMES[path] = Name(path, why, part, taken=False)


def take_all() -> None:
    """Import every file of this room, so that `NAMES` and `GONE` are complete."""
    room = importlib.import_module(__package__)
    for file in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        importlib.import_module(file.name)


def _resolved(path: str) -> Any:
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def _missing(path: str, why: str) -> MissingInTorch:
    import torch

    name = path.replace(":", ".")
    return MissingInTorch(f"torch {torch.__version__} has no {name}, which {why}")


class _Absent(type):
    """Stands for a name that is gone: a class, so that it may be a base, or be asked by isinstance.
    Whatever is done with it raises.
    """

    def _raise(cls, *args: Any, **kwargs: Any) -> NoReturn:
        taken = next(c for c in cls.__mro__ if "_why" in vars(c))  # not a class below it
        raise _missing(taken.__name__, vars(taken)["_why"])

    __call__ = __instancecheck__ = __subclasscheck__ = __enter__ = __exit__ = __setattr__ = _raise
    __len__ = __iter__ = __contains__ = __getitem__ = __setitem__ = __delitem__ = _raise

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks of any class
            raise AttributeError(name)
        cls._raise()
