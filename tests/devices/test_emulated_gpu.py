"""A GPU that is emulated, each part in a process of its own (`tests/support/emulated_*.py`).

What the tests on it rely on to notice a fault: memory that is NaN until it is written, low results
that are rounded, waits that raise, copies that come late. If anything else of it is wrong, they
fail by themselves. Then CUDA graph trees: what is recorded, and what a replay does to memory; the
graphs are functions of the tests' own, handed over as Inductor does it. And a training, op by op:
values against FP64, and nobody waits.
"""

from typing import Any

import pytest
from emulated import needs_a_compiler
from gpus_by_name import told as told_by

pytestmark = needs_a_compiler("2.13")


def told(script: str, part: str) -> Any:
    """What a script tells of one of its parts."""
    return told_by(f"emulated_{script}.py", "h100", profile="none")[part]


# -- what notices a fault --------------------------------------------------------------------------

slow = pytest.mark.slow("a GPU that is emulated, in a process of its own")


@slow
def test_fresh_memory_is_nan_in_every_dtype() -> None:
    assert all(told("eager", "fresh_memory"))


@slow
def test_low_products_are_summed_in_fp32_and_rounded_once() -> None:
    assert all(told("eager", "products"))


@slow
def test_operands_of_two_dtypes_are_refused() -> None:
    """In FP32, in which they are computed, they would be of one."""
    for message in told("eager", "refused"):
        assert "one dtype" in message


@slow
@pytest.mark.parametrize("call", ["item", "if", "nonzero", "mask", "cpu", "to the device"])
def test_what_waits_for_the_device_raises(call: str) -> None:
    assert "synchronizing CUDA operation" in told("eager", "waits")[call]


@slow
@pytest.mark.parametrize("call", ["in time", "pinned to the device", "add", "product", "optimizer"])
def test_what_does_not_wait_goes_on(call: str) -> None:
    assert told("eager", "waits")[call] == ""


@slow
def test_a_copy_to_pinned_memory_arrives_with_its_event() -> None:
    """Not before, and with the values of the time when it was asked for."""
    found = told("eager", "late_copies")
    assert found["early"]
    assert not found["asked"]
    assert found["happened"]
    assert found["arrived"] == [5.0, 5.0, 5.0]
    assert found["early again"]
    assert found["waited for"] == [float(found["kernels"])] * 3


# -- CUDA graphs -----------------------------------------------------------------------------------


def three(value: float) -> list[float]:
    return [value] * 3


def test_a_graph_warms_up_is_recorded_and_then_replayed() -> None:
    found = told("graphs", "stages")
    assert (found["warmups"], found["recordings"], found["replays"]) == (1, 1, 2)
    assert found["results"] == [three(2.0 * step) for step in range(4)]
    assert found["fixed"], "a recording's results lie where they lay"


def test_a_result_is_written_over_by_the_next_step() -> None:
    found = told("graphs", "kept_results")
    assert found["at once"] == three(2.0)
    assert found["warmed up"], "what a step returned before the recording is gone, too"
    assert found["kept"] == three(2 * 4.0), "the next step's"
    assert found["copied"] == three(2.0)


def test_only_what_stays_may_be_written_to() -> None:
    """Each step adds 1, whether it is recorded or not: a recording runs it no second time."""
    found = told("graphs", "written_inputs")
    assert found["stays"]["value"] == found["moves"]["value"] == three(3.0)
    assert (found["stays"]["skipped"], found["stays"]["replays"]) == (0, 1)
    assert (found["moves"]["skipped"], found["moves"]["recordings"]) == (3, 0)
    assert found["skips"] == 3, "Inductor's count"


# -- a training ------------------------------------------------------------------------------------

each_level = pytest.mark.parametrize("level", ["O1", "O2"])


@each_level
def test_a_training_follows_fp64(level: str) -> None:
    """In FP16, whose values have 11 bits; what each parameter moved by is a sum of a few."""
    found = told("training", level)
    assert found["losses"] == pytest.approx(found["exact"], rel=2.0**-10)
    assert found["moved"] < 4 * 2.0**-10


@each_level
def test_a_step_that_overflows_is_skipped_though_nobody_waits(level: str) -> None:
    """And halves the scale, from 2^10."""
    found = told("training", level)
    assert found["skipped"] == 1
    assert found["scale"] == 2.0**9
