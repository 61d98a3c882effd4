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


def test_an_input_that_stays_must_stay() -> None:
    """It moves in the fourth step, which records once more; the fifth replays that."""
    found = told("moved_inputs")
    assert found["results"] == [three(step + (10.0 if step > 2 else 1.0)) for step in range(5)]
    assert (found["recordings"], found["replays"]) == (2, 2)
    assert found["rerecorded"] == [[1]]
    assert found["copied"] == 2, "Inductor's count: of two inputs, one in each recording"


def test_only_what_stays_may_be_written_to() -> None:
    """Each step adds 1, whether it is recorded or not: a recording runs it no second time."""
    found = told("written_inputs")
    assert found["stays"]["value"] == found["moves"]["value"] == three(3.0)
    assert (found["stays"]["skipped"], found["stays"]["replays"]) == (0, 1)
    assert (found["moves"]["skipped"], found["moves"]["recordings"]) == (3, 0)
    assert found["skips"] == 3, "Inductor's count"


def test_no_step_begins_between_a_forward_and_its_backward() -> None:
    """So the backward reads what the forward has saved, and is recorded after it."""
    found = told("backward_due")
    assert found["saved"] == [three(4.0)] * 3
    assert (found["warmups"], found["recordings"], found["replays"]) == (2, 2, 2)
