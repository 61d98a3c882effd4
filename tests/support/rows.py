"""Which rows of a test's matrix the default run takes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

__all__ = ["covering"]

Row = tuple[str, ...]


def covering(rows: Sequence[Row]) -> list[int]:
    """Numbers of rows, in order, such that each value of each axis occurs: one program in FP16 at
    O1, the next in BF16 at O2. Of rows that would do, the one whose pairs of values, and then whose
    values, were taken least often.

    Args:
        rows: of each row its value on each axis. With one axis, all are taken.
    """
    values = [tuple(enumerate(row)) for row in rows]
    pairs = [tuple(itertools.combinations(row, 2)) for row in values]
    left = {value for row in values for value in row}
    often: Counter[Any] = Counter()

    def taken_before(number: int) -> list[int]:
        return [sum(often[x] for x in of[number]) for of in (pairs, values)]

    taken = []
    while left:
        best = min((i for i, row in enumerate(values) if left.intersection(row)), key=taken_before)
        left.difference_update(values[best])
        often.update((*pairs[best], *values[best]))
        taken.append(best)
    return sorted(taken)
