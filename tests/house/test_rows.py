"""The rows that the default run takes of a matrix."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from rows import covering

PROGRAMS = [f"program {i}" for i in range(19)]


@pytest.mark.parametrize(
    "axes",
    [
        (PROGRAMS, ("O1", "O2")),
        (PROGRAMS, ("O1", "O2"), ("eager", "aot_eager")),
        (("FP16", "BF16"), ("O1", "O2", "O3"), PROGRAMS[:5], ("a", "b")),
        (("a", "b"), ("c", "d")),
    ],
)
def test_each_value_occurs_and_those_of_an_axis_about_equally_often(
    axes: tuple[tuple[str, ...], ...],
) -> None:
    rows = list(itertools.product(*axes))
    taken = [rows[i] for i in covering(rows)]
    assert len(taken) == max(map(len, axes))
    for axis, found in zip(axes, zip(*taken, strict=True), strict=True):
        often = Counter(found)
        assert set(often) == set(axis)
        assert max(often.values()) <= min(often.values()) + 1


def test_all_of_one_axis_and_a_test_without_any() -> None:
    assert covering([(name,) for name in PROGRAMS]) == list(range(len(PROGRAMS)))
    assert covering([("",)]) == [0]


def test_a_matrix_with_holes() -> None:
    rows = [("a", "O1"), ("a", "O2"), ("b", "O1"), ("c", "O1")]
    taken = [rows[i] for i in covering(rows)]
    assert {name for name, _ in taken} == {"a", "b", "c"}
    assert {level for _, level in taken} == {"O1", "O2"}
