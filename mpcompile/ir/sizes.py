"""Comparisons of sizes, which may hold symbols. No comparison adds a guard."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx.experimental import symbolic_shapes

from .shapes import Size


def known_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for all values of their symbols; adds no guard."""
    return bool(symbolic_shapes.statically_known_true(a == b))


def known_multiple(size: Size, of: int) -> bool:
    """Whether a size is a multiple of a number for all values of its symbols; adds no guard."""
    return bool(symbolic_shapes.statically_known_true(size % of == 0))


def same_shape(a: Iterable[Size], b: Iterable[Size]) -> bool:
    """Whether two shapes are equal for all values of their symbols; adds no guard."""
    left, right = tuple(a), tuple(b)
    return len(left) == len(right) and all(map(known_equal, left, right))


def hint(size: Size) -> int:
    """The size in the inputs that were traced; use it for estimates only. Adds no guard."""
    if isinstance(size, int):
        return size
    return symbolic_shapes.optimization_hint(size, fallback=1)
