"""What is switched off on this release of torch.

    why_off(Part.WHOLE_STEP)    None, or "torch._dynamo.x: it is gone; it notes that ..."

A part is off if a private name is gone that it can't do without. Whether what is compiled computes
what was meant is no matter of releases: it is seen where it runs (`mpcompile/verify`).
"""

from __future__ import annotations

import torch

from ..errors import MPCompileError
from .private_names import GONE, Part

__all__ = ["refuse", "why_off"]


def why_off(part: Part) -> str | None:
    """Why a part of mpcompile is switched off on this torch, as a phrase; None if it isn't."""
    gone = next((name for name in GONE if name.part is part), None)
    return None if gone is None else f"{gone.path.replace(':', '.')}: it is gone; it {gone.why}"


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
