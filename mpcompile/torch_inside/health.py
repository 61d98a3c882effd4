"""What works on this release of torch, and what is switched off on it.

    why_off(Part.WHOLE_STEP)    None, or "a whole step that sets lr: its weights are off by 0.5"

A part is off if a private name is gone that it can't do without, and if the last check of this
torch (`mpcompile check`) found it wrong. On a release newer than all that were tested, `checked.py`
has a check made before the first compile.
"""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .._version import __version__
from ..errors import MPCompileError
from .reach import GONE, Name, Part

__all__ = ["Failure", "Health", "assumed", "missing", "refuse", "this_health", "why_off"]


@dataclass(frozen=True)
class Failure:
    """One thing that isn't as it should be on this torch.

    Attributes:
        what: a private name of torch's, or a program of the check.
        part: what is switched off because of it; None: nothing, a warning says so where it happens.
        why: what was seen, as a phrase.
    """

    what: str
    part: Part | None
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class Health:
    """What a check has found.

    Attributes:
        failures: what isn't as it should be.
        tried: how many names and programs were tried; 0: there was no check.
        torch, mpcompile, python: the versions that it holds for.
    """

    failures: tuple[Failure, ...] = ()
    tried: int = 0
    torch: str = torch.__version__
    mpcompile: str = __version__
    python: str = platform.python_version()

    def why_off(self, part: Part) -> str | None:
        """Why a part is switched off, as a phrase; None if it isn't."""
        return next((str(f) for f in self.failures if f.part is part), None)

    def off(self) -> dict[Part, str]:
        """All parts that are switched off, and why."""
        why = {part: self.why_off(part) for part in Part if part is not Part.SAY}
        return {part: reason for part, reason in why.items() if reason is not None}

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON; a part by its name."""
        rows = [{**vars(f), "part": f.part and f.part.name} for f in self.failures]
        return {**vars(self), "failures": rows}

    @classmethod
    def of(cls, data: Any) -> Health:
        """The inverse of `to_dict`.

        Raises:
            ValueError, KeyError, TypeError: it is of no such form.
        """
        rows = [{**row, "part": row["part"] and Part[row["part"]]} for row in data["failures"]]
        return cls(**{**data, "failures": tuple(Failure(**row) for row in rows)})


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
            from .checked import last_or_new

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
