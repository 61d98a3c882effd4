"""Torch's own operations in symbolic sizes; sums and products are sympy's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .private_names import Part, private

if TYPE_CHECKING:
    from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, PythonMod
else:
    _ROOM = "torch.utils._sympy.functions"
    CleanDiv = private(f"{_ROOM}:CleanDiv", "divides a size without a rest", Part.COMPILE)
    FloorDiv = private(f"{_ROOM}:FloorDiv", "divides a size", Part.COMPILE)
    Mod = private(f"{_ROOM}:Mod", "is the rest of a size", Part.COMPILE)
    PythonMod = private(f"{_ROOM}:PythonMod", "is the rest of a size", Part.COMPILE)

__all__ = ["CleanDiv", "FloorDiv", "Mod", "PythonMod"]
