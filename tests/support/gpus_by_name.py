"""Processes that see a GPU which exists by name only (`fakecuda`), and what they tell."""

import functools
import json
from typing import Any

import pytest
import torch
from processes import python

needs_a_cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None, reason="this torch has a CUDA device of its own"
)


@functools.cache
def told(script: str, gpu: str, profile: str = "") -> Any:
    """What `tests/support/<script>` prints for a GPU, as JSON; run once."""
    return json.loads(python(f"tests/support/{script}", gpu, MPCOMPILE_PROFILE=profile).stdout)
