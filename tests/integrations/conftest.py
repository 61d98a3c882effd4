"""What the tests of trainers share."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Accelerate keeps its settings for the process."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
        state.PartialState._reset_state()
