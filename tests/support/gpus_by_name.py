"""Processes that see a GPU which exists by name only (`fakecuda`), and what they tell."""

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from repository import ROOT

needs_a_cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None, reason="this torch has a CUDA device of its own"
)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own in the repository's root, without a profile."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPCOMPILE_PROFILE": "", **environment},
    )  # fmt: skip


@functools.cache
def told(script: str, gpu: str) -> Any:
    """What `tests/support/<script>` prints for a GPU, as JSON; run once."""
    run = python(f"tests/support/{script}", gpu)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)
