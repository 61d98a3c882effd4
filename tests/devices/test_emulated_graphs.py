"""CUDA graph trees on a GPU that is emulated: what is recorded, and what a replay does to memory.

The graphs are functions of the tests' own (`tests/support/emulated_graphs.py`), handed over as
Inductor does it.
"""

from typing import Any

from emulated import needs_a_compiler, told_by

pytestmark = needs_a_compiler("2.13")


def told(part: str) -> Any:
    return told_by("emulated_graphs.py", "h100")[part]


def three(value: float) -> list[float]:
    return [value] * 3


def test_a_graph_warms_up_is_recorded_and_then_replayed() -> None:
    found = told("stages")
    assert (found["warmups"], found["recordings"], found["replays"]) == (1, 1, 2)
    assert found["results"] == [three(2.0 * step) for step in range(4)]
    assert found["fixed"], "a recording's results lie where they lay"


def test_a_result_is_written_over_by_the_next_step() -> None:
    found = told("kept_results")
    assert found["at once"] == three(2.0)
    assert found["warmed up"], "what a step returned before the recording is gone, too"
    assert found["kept"] == three(2 * 4.0), "the next step's"
    assert found["copied"] == three(2.0)


def test_only_what_stays_may_be_written_to() -> None:
    """Each step adds 1, whether it is recorded or not: a recording runs it no second time."""
    found = told("written_inputs")
    assert found["stays"]["value"] == found["moves"]["value"] == three(3.0)
    assert (found["stays"]["skipped"], found["stays"]["replays"]) == (0, 1)
    assert (found["moves"]["skipped"], found["moves"]["recordings"]) == (3, 0)
    assert found["skips"] == 3, "Inductor's count"
