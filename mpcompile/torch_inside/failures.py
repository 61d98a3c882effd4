"""What a check of this torch has found, as plain data."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch

from .._version import __version__
from .private_names import Part


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
