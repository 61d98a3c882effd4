"""A whole step on a GPU that exists by name: kernels, host reads, and what would be recorded."""

from typing import Any

import pytest
from gpus_by_name import needs_a_cpu_build, told

pytestmark = [
    pytest.mark.slow("counts kernels of a GPU by name, in a process of its own"),
    needs_a_cpu_build,
    pytest.mark.parametrize("level", ["O1", "O2"]),
]


def both(level: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is told of the step in pieces, and of the whole one."""
    found = [run for run in told("fake_cuda_whole_step.py", "h100") if run["level"] == level]
    pieces, whole = sorted(found, key=lambda run: bool(run["whole"]))
    return pieces, whole


def test_it_is_no_more_kernels_than_the_pieces_and_moves_no_more(level: str) -> None:
    """In pieces, a kernel looks at many gradients (`passes/joint/together.py`). Here the
    step reads them anyway: each is looked at by what updates its parameter.
    """
    pieces, whole = both(level)
    assert whole["left"] is None
    assert whole["kernels"] <= pieces["kernels"]
    assert whole["bytes"] < 1.001 * pieces["bytes"]


def test_nobody_waits_for_the_device(level: str) -> None:
    for run in both(level):
        assert run["reads"] == 0


def test_it_is_recorded_as_one_cuda_graph_whose_state_stays(level: str) -> None:
    """Parameters, two moments and a counter each, copies at O2 and the scale are written to."""
    pieces, whole = both(level)
    assert whole["not recorded"] == 0
    assert len(pieces["recorded"]) == 2  # forward and backward
    (graph,) = whole["recorded"]
    assert set(graph["written"]) <= set(graph["stay"])
    assert len(graph["written"]) >= (5 if level == "O2" else 4) * whole["parameters"]
