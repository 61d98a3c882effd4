"""What the tests on an emulated GPU rely on to notice a fault: memory that is NaN until it is
written, low results that are rounded, waits that raise, copies that come late. If anything else of
it is wrong, they fail by themselves.

It is used in a process of its own (`tests/support/emulated_eager.py`).
"""

from typing import Any

import pytest
from emulated import needs_a_compiler, told_by

pytestmark = [
    pytest.mark.slow("a GPU that is emulated, in a process of its own"),
    needs_a_compiler("2.13"),
]


def told(part: str) -> Any:
    return told_by("emulated_eager.py", "h100")[part]


def test_fresh_memory_is_nan_in_every_dtype() -> None:
    assert all(told("fresh_memory"))


def test_low_products_are_summed_in_fp32_and_rounded_once() -> None:
    assert all(told("products"))


def test_operands_of_two_dtypes_are_refused() -> None:
    """In FP32, in which they are computed, they would be of one."""
    for message in told("refused"):
        assert "one dtype" in message


@pytest.mark.parametrize("call", ["item", "if", "nonzero", "mask", "cpu", "to the device"])
def test_what_waits_for_the_device_raises(call: str) -> None:
    assert "synchronizing CUDA operation" in told("waits")[call]


@pytest.mark.parametrize("call", ["in time", "pinned to the device", "add", "product", "optimizer"])
def test_what_does_not_wait_goes_on(call: str) -> None:
    assert told("waits")[call] == ""


def test_a_copy_to_pinned_memory_arrives_with_its_event() -> None:
    """Not before, and with the values of the time when it was asked for."""
    found = told("late_copies")
    assert found["early"]
    assert not found["asked"]
    assert found["happened"]
    assert found["arrived"] == [5.0, 5.0, 5.0]
    assert found["early again"]
    assert found["waited for"] == [float(found["kernels"])] * 3
