"""What works on this release of torch, and what is switched off on it.

    why_off(Part.WHOLE_STEP)    None, or "a whole step that sets lr: its weights are off by 0.5"

A part is off if a private name is gone that it can't do without, and if the last check of this
torch (`mpcompile check`) found it wrong. On a release newer than all that were tested, `checked.py`
has a check made before the first compile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from ..errors import MPCompileError
from .checked import last_or_new
from .failures import Failure, Health
from .private_names import GONE, Name, Part

__all__ = ["assumed", "missing", "refuse", "this_health", "why_off"]


_known: Health | None = None
_lock = threading.RLock()


def why_off(part: Part) -> str | None:
    """Why a part of mpcompile is switched off on this torch, as a phrase; None if it isn't."""
    gone = next((name for name in GONE if name.part is part), None)
    return str(missing(gone)) if gone is not None else this_health().why_off(part)


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


def this_health() -> Health:
    """What the last check of this torch has found; on one that is newer than all that were tested,
    the first call may have one made, which takes a minute. Warns once of what is off.
    """
    global _known
    with _lock:
        if _known is None:
            _known = last_or_new()
        return _known


@contextlib.contextmanager
def assumed(health: Health) -> Iterator[None]:
    """Take this for what is known, in all threads: while a check runs, and in tests."""
    global _known
    with _lock:
        before, _known = _known, health
    try:
        yield
    finally:
        _known = before


def missing(name: Name) -> Failure:
    """What is said about a name that is gone."""
    return Failure(name.path.replace(":", "."), name.part, f"it is gone; it {name.why}")
