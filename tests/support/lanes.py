"""Which tests `make test` runs, which are slow, which are for sweeps; and how long one may take.

A test is in the lane of `make test` if no marker says otherwise:

    slow(reason)              in `make test-all`
    sweep(reason)             in `make sweep`
    slow_rows(reason, but=1)  all its rows are slow but for the first ones
    sampled(n)                all its rows are for sweeps but for every n-th

Of a test with several axes, `make test` and `make test-all` take as many rows as show each value of
each axis; the others are for sweeps.
"""

import collections
import itertools
import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest

LIMIT = 300.0
"""Seconds that a test may take, on a machine like the one that `_USUAL` was measured on."""
_USUAL = 0.12  # seconds of `_work` on an idle core of an AMD EPYC 9004
_SWEEPS = 10.0  # times the limit
_VARIABLE = "MPCOMPILE_TEST_SECONDS"

Row = tuple[str, ...]


def put_in_lanes(items: Sequence[pytest.Item], every: int = 1) -> None:
    """Mark the rows of tests that a lane leaves out.

    Args:
        items: all tests that were collected.
        every: take every n-th of the rows that would be taken.

    Raises:
        pytest.UsageError: a marker gives no reason.
    """
    tests: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        for name in ("slow", "sweep", "slow_rows"):
            if (mark := item.get_closest_marker(name)) and not (mark.args and mark.args[0]):
                raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.{name} needs a reason")
        if item.get_closest_marker("sweep"):
            item.add_marker(pytest.mark.timeout(_SWEEPS * limit()))
        else:
            tests[item.nodeid.partition("[")[0]].append(item)
    for rows in tests.values():
        mark = rows[0].get_closest_marker("sampled")
        if mark is None:
            dear = {i for i, row in enumerate(rows) if row.get_closest_marker("slow")}
            taken = [rows[i] for i in covering([_values(row) for row in rows], dear)][::every]
        else:
            taken = rows[:: max(every, mark.args[0])]
        for row in set(rows).difference(taken):
            row.add_marker(pytest.mark.sweep("its values occur in other rows"))
        if mark := rows[0].get_closest_marker("slow_rows"):
            for row in taken[mark.kwargs.get("but", 1) :]:
                row.add_marker(pytest.mark.slow(*mark.args))
    for item in items:
        item.user_properties.append(("lane", lane(item)))  # for pytest's report


def lane(item: pytest.Item) -> str:
    """The lane that a test is in: `test`, `slow` or `sweep`."""
    return next((name for name in ("sweep", "slow") if item.get_closest_marker(name)), "test")


def _values(row: pytest.Item) -> Row:
    """The name of its value on each axis: one for each `parametrize`."""
    callspec = getattr(row, "callspec", None)
    return tuple(callspec._idlist) if callspec is not None else ("",)


def covering(rows: Sequence[Row], dear: Collection[int] = ()) -> list[int]:
    """Numbers of rows, in order, such that each value of each axis occurs: one program in FP16 at
    O1, the next in BF16 at O2. Of rows that would do, the one whose pairs of values, and then whose
    values, were taken least often.

    Args:
        rows: of each row its value on each axis. With one axis, all are taken.
        dear: numbers of rows that count as taken four times, so that fewer of them are.
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
        for _ in range(4 if best in dear else 1):
            often.update((*pairs[best], *values[best]))
        taken.append(best)
    return sorted(taken)


def limit() -> float:
    """The seconds that a test may take: what `set_limit` found, in its own processes, too."""
    return float(os.environ.get(_VARIABLE, LIMIT))


def set_limit(config: pytest.Config) -> None:
    """Give tests more time on a slow or a busy machine. Workers are handed what was found first."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = str(round(LIMIT * slower()))
    if config.option.timeout is None:
        config.option.timeout = limit()


def slower() -> float:
    """How many times slower than usual this machine is now, with all that it does; at least 1."""
    start = time.perf_counter()
    for _ in range(3):
        _work()
    return max(1.0, (time.perf_counter() - start) / 3 / _USUAL)


def _work() -> None:
    """Compiling is what takes the tests' time, and most of that is Python."""
    found = {n: [n, str(n)] for n in range(200_000)}
    sum(len(text) for _, text in found.values())
