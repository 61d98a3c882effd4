"""Tests on a GPU that is emulated (`benchmarks/emucuda/`), and processes that see one."""

import functools
import json
import os
import shutil
import sys
from typing import Any

import pytest
import torch
from gpus_by_name import python

EMULATED = "benchmarks.emucuda" in sys.modules
"""Whether this process sees an emulated GPU. It does from its start on, or never."""


def sized(real: int, emulated: int) -> int:
    """A size, or a smaller one where the host computes what a GPU would."""
    return emulated if EMULATED else real


def needs_a_compiler(*releases: str) -> pytest.MarkDecorator:
    """Skip where the library of the emulated GPU can't be built, or wasn't read in this torch."""
    release = ".".join(torch.__version__.split(".")[:2])
    if torch.version.cuda is not None:
        reason = "this torch has a CUDA device of its own"
    elif release not in releases:
        reason = f"the emulated GPU was read in torch {', '.join(releases)}, not {release}"
    elif not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        reason = "no C++ compiler"
    else:
        reason = ""
    return pytest.mark.skipif(bool(reason), reason=reason)


@functools.cache
def told_by(script: str, gpu: str) -> Any:
    """What `tests/support/<script>` prints as JSON in a process that sees the GPU; run once."""
    run = python(f"tests/support/{script}", gpu, MPCOMPILE_PROFILE="none")
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)
