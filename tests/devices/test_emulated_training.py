"""A training on a GPU that is emulated, op by op: values against FP64, and nobody waits.

In fresh memory there is NaN, and what was skipped becomes known late
(`tests/support/emulated_training.py`).
"""

from typing import Any

import pytest
from emulated import needs_a_compiler, told_by

pytestmark = [needs_a_compiler("2.13"), pytest.mark.parametrize("level", ["O1", "O2"])]


def told(level: str) -> Any:
    return told_by("emulated_training.py", "h100")[level]


def test_it_follows_fp64(level: str) -> None:
    """In FP16, whose values have 11 bits; what each parameter moved by is a sum of a few."""
    found = told(level)
    assert found["losses"] == pytest.approx(found["exact"], rel=2.0**-10)
    assert found["moved"] < 4 * 2.0**-10


def test_a_step_that_overflows_is_skipped_though_nobody_waits(level: str) -> None:
    """And halves the scale, from 2^10."""
    found = told(level)
    assert found["skipped"] == 1
    assert found["scale"] == 2.0**9
