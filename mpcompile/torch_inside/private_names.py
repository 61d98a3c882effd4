"""How private names of torch are taken: where one is gone, its part of mpcompile is off.

    with needed_for(Part.RANKS):
        from torch.distributed._composable_state import _get_module_state as engine_of

    if not TYPE_CHECKING:
        __getattr__ = gone

Where torch lacks a name of such a block, import goes on. `why_off(Part.RANKS)` tells which one it
is, and each name of the block that is missing raises `MissingInTorch` when it is used.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from ..errors import CannotRewrite, MPCompileError


class Part(enum.Enum):
    """What can't do without a name; the value says what happens where the name is gone."""

    COMPILE = "nothing is compiled: mpcompile() raises"
    INDUCTOR = 'emit="inductor" raises; emit="aot_eager" does without'
    WHOLE_STEP = "training steps are not one graph: their parts are compiled apart"
    OPTIMIZER = "MPOptimizer raises; plain optimizers do without"
    RECURRENT = "graphs with recurrent layers stay in FP32"
    RANKS = "models of several processes are refused"
    EXPLAIN = "explain, diagnose and plans raise"
    SAY = "a message says less"


class MissingInTorch(CannotRewrite, MPCompileError):
    """A private name that this release of torch lacks; the message says which.

    A reason to do without, where there is a way to; an error for the user everywhere else.
    """


GONE: list[tuple[Part, str]] = []
"""What this torch lacks: the part that can't do without, and what Python says of the name."""


@contextlib.contextmanager
def needed_for(part: Part) -> Iterator[None]:
    """Import private names of torch; one that is gone ends the block, and switches the part off."""
    try:
        yield
    except (ImportError, AttributeError) as error:  # this, from inside of a module of torch's
        GONE.append((part, str(error).partition(" (")[0]))  # without the path of a file


def gone(name: str) -> Any:
    """What a module has in the place of a name that torch lacks: a class that raises
    MissingInTorch, whatever is done with it. `__getattr__` of the modules of this room.
    """
    if name.startswith("__") or not GONE:
        raise AttributeError(name)
    return _Gone(name, (), {})


class _Gone(type):
    """A class, so that it may be a base, or be asked by isinstance."""

    def _raise(cls, *args: Any, **kwargs: Any) -> NoReturn:
        lacks = "; ".join(why for _, why in GONE)
        raise MissingInTorch(f"torch {torch.__version__} lacks what {cls.__name__} needs ({lacks})")

    __call__ = __instancecheck__ = __subclasscheck__ = __enter__ = __exit__ = __setattr__ = _raise
    __len__ = __iter__ = __contains__ = __getitem__ = __setitem__ = __delitem__ = _raise

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks of any class
            raise AttributeError(name)
        cls._raise()


def why_off(part: Part) -> str | None:
    """Why a part of mpcompile is switched off on this torch, as a phrase; None if it isn't."""
    return next((why for other, why in GONE if other is part), None)


def refuse(part: Part, what: str, instead: str) -> None:
    """Raise if a part is switched off.

    Args:
        part: what is needed.
        what: what was asked for, as it begins a sentence.
        instead: what to do, as an imperative.

    Raises:
        MPCompileError: it is off; the message says why, and what to do.
    """
    if (why := why_off(part)) is not None:
        raise MPCompileError(f"{what} is off on torch {torch.__version__} ({why}): {instead}")
