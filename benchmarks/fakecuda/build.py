"""Build the library of `guard.cpp` against the installed torch, once for each torch and source.

Nothing here imports torch: the library must be loaded before it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs

__all__ = ["CannotBuild", "library"]

SOURCE = Path(__file__).with_name("guard.cpp")


class CannotBuild(RuntimeError):
    """There is no compiler, no headers, or a torch that has CUDA itself; the message says what."""


def library() -> Path:
    """The library, built if need be (some 5 s).

    Raises:
        CannotBuild: what is missing, and how to get it.
    """
    torch = _torch()
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(SOURCE.read_bytes() + str(torch).encode()).hexdigest()[:12]
    path = platformdirs.user_cache_path("mpcompile") / "fakecuda" / f"{version}-{digest}.so"
    if not path.exists():
        _compile(torch, path)
    return path


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuild("torch is not installed")
    torch = Path(found.origin).parent
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuild(
            "this torch is a CUDA build, which registers a CUDA device of its own: the device that "
            "exists by name only needs a CPU build"
        )
    if not (torch / "include" / "ATen" / "detail" / "CUDAHooksInterface.h").exists():
        raise CannotBuild(
            f"torch's C++ headers are not in {torch / 'include'}: reinstall its wheel"
        )
    return torch


def _compile(torch: Path, path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuild("no C++ compiler: install g++, or set CXX to one")
    include, lib = torch / "include", torch / "lib"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            compiler, "-O1", "-std=c++20", "-fPIC", "-shared", str(SOURCE), "-o", str(made),
            f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
            f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}",
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            first = next((x for x in run.stderr.splitlines() if "error" in x), run.stderr[:200])
            raise CannotBuild(f"{compiler} can't compile {SOURCE.name}: {first}")
        os.replace(made, path)  # whole or not at all: two processes may build at once
