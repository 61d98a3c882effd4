"""What the search for the loss scale takes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import unittest.mock
from collections.abc import Iterator
from typing import Any

from mpcompile.scaling import fit_scale

__all__ = ["Search", "search"]


@dataclasses.dataclass
class Search:
    """What searching has taken: runs of forward and backward, and seconds."""

    again: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def search() -> Iterator[Search]:
    """Count what is run beyond the one forward and backward that were asked for."""
    spent, asked = Search(), [0.0]
    again, backward, find = (getattr(fit_scale._Trial, n) for n in ("again", "backward", "find"))

    def count_again(*args: Any) -> Any:
        spent.again += 1
        return again(*args)

    def time_backward(*args: Any) -> Any:
        start = time.perf_counter()
        result = backward(*args)
        asked.append(time.perf_counter() - start)
        return result

    def time_find(*args: Any) -> Any:
        asked.clear()
        start = time.perf_counter()
        result = find(*args)
        spent.seconds += time.perf_counter() - start - asked[0]
        return result

    with unittest.mock.patch.multiple(
        fit_scale._Trial, again=count_again, backward=time_backward, find=time_find
    ):
        yield spent
