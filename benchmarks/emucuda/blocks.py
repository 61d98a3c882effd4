"""Larger blocks than Inductor chose: numpy's calls cost more than its elements.

A GPU wants thousands of programs of a thousand elements. The interpreter runs one after the other,
so a kernel should be few programs of many elements. What a program computes does not depend on its
size, but for sums over several steps of a loop. Two things must hold: where Inductor left a mask
out, since its own blocks divide the size, so must ours; and kernels whose programs share out a
reduction keep their blocks.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["IN_TEXT", "larger"]

MOST = 2**17
"""Elements that one program works on. More is no faster, and takes memory for each operator."""

IN_TEXT = 2**14
"""The same for a kernel over many tensors, most of which are small: it has one size for all."""

_GRIDS = ("Grid1D", "Grid2D", "Grid3D", "Grid2DWithYZOverflow")


def larger(tuner: Any, blocks: dict[str, int], values: Mapping[str, Any]) -> dict[str, int]:
    """Block sizes of a kernel with such arguments.

    Args:
        tuner: Inductor's `CachingAutotuner`.
        blocks: Inductor's choice, as `{"XBLOCK": 128}`.
        values: the arguments by their names, with the sizes `xnumel` and so on.
    """
    grid = tuner.inductor_meta.get("grid_type", "")
    source = source_of(tuner.fn)
    if "ComboKernel" in grid:
        return _of_several(blocks, source)
    if tuner.is_mix_order_reduction or "RSPLIT" in blocks or grid not in _GRIDS:
        return blocks
    found = dict(blocks)
    room = MOST
    for axis, hint in (tuner.size_hints or {}).items():
        if axis.startswith("r"):
            room //= max(1, found.get(f"{axis.upper()}BLOCK", _power_above(hint)))
    if "R0_BLOCK" in found and "r0_numel" in values:
        whole = _whole("r0_", values["r0_numel"], MOST, source)
        room = max(1, room * found["R0_BLOCK"] // whole)
        found["R0_BLOCK"] = whole
    for axis in "xyz":
        name = f"{axis.upper()}BLOCK"
        if name in found:
            found[name] = _whole(axis, values[f"{axis}numel"], max(room, 1), source)
            room //= found[name]
    return found


def _of_several(blocks: dict[str, int], source: str) -> dict[str, int]:
    """Of a kernel that does several kernels' work, one size for all."""
    sizes = [int(n) for n in re.findall(r"xnumel = (\d+)", source)]
    masked = "xmask = tl.full" not in source and "program_id(1)" not in source
    if set(blocks) != {"XBLOCK"} or not sizes or not masked:
        return blocks
    return {"XBLOCK": max(blocks["XBLOCK"], min(_power_above(max(sizes)), MOST))}


def _whole(axis: str, size: int, most: int, source: str) -> int:
    """A block that holds the whole axis, or as much as there is room for."""
    size = max(1, int(size))
    masked = f"{axis}mask" in source and f"{axis}mask = tl.full" not in source
    found = _power_above(size) if masked else size & -size  # the largest power that divides it
    return max(1, min(found, most))


def _power_above(size: int) -> int:
    return 1 << (int(size) - 1).bit_length()


@functools.cache
def source_of(kernel: Any) -> str:
    """The text of a kernel."""
    return inspect.getsource(kernel.fn)
