"""The C++ compiler that Inductor uses on CPUs: what is wrong with it on this one."""

from __future__ import annotations

import functools
import re
import subprocess

import torch

from ..torch_inside.inductor import cpp_compiler

GCC_FLAG = "-fno-tree-loop-distribute-patterns"
"""A flag of g++'s that costs no time, and cures its copies of tiles (`GCC_MISCOPIES_TILES`)."""


def miscopies_tiles() -> bool:
    """Whether Inductor's compiler may be a g++ that has the fault: one that tunes for no CPU in
    particular, as it doesn't know this one, which has AVX512.
    """
    has_vectors = bool(torch.cpu.get_capabilities().get("avx512_f"))
    return has_vectors and tuning(cpp_compiler()) == "generic"


def tuning(compiler: str | None) -> str | None:
    """The CPU that a g++ tunes for where it is told to take this one; None of other compilers."""
    target = said(compiler, "-march=native", "-Q", "--help=target")
    found = re.search(r"^\s*-mtune=\s+(\S+)", target, re.MULTILINE)
    return found.group(1) if found else None


@functools.cache
def said(compiler: str | None, *asked: str) -> str:
    """What a compiler says to arguments; nothing if it doesn't understand."""
    if compiler is None:
        return ""
    try:
        told = subprocess.run(
            [compiler, *asked], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout
