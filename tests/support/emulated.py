"""Tests on a GPU that is emulated (`benchmarks/emucuda/`), and processes that see one."""

import os
import shutil
import sys

import pytest
import torch

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
