"""The geometric means over the tasks, of every peer."""

from __future__ import annotations

import pytest

from benchmarks.peers.report import geometric_mean


def test_the_geometric_mean_of_twice_and_half_is_one() -> None:
    mean, low, high = geometric_mean([([2.0, 2.0], [1.0, 1.0]), ([1.0, 1.0], [2.0, 2.0])])
    assert (mean, low, high) == pytest.approx((1.0, 1.0, 1.0))


def test_the_interval_of_a_geometric_mean_holds_what_the_rounds_say() -> None:
    peer, ours = [1.0, 2.0, 4.0, 2.0, 2.0], [1.0] * 5
    mean, low, high = geometric_mean([(peer, ours)])
    assert mean == pytest.approx(2.0)
    assert 1.0 <= low <= 2.0 <= high <= 4.0
    assert low < high
