"""Build the C++ library of a device against the installed torch, once for each torch and source.

Nothing here imports torch: the library must be loaded before it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

SHARED = Path(__file__).parent


class CannotBuild(RuntimeError):
    """There is no compiler, no headers, or a torch that has CUDA itself; the message says what."""


def load(source: Path) -> ctypes.CDLL:
    """The library of a C++ file, loaded into this process.

    Raises:
        CannotBuild: what is missing, or that torch is there already.
    """
    if "torch" in sys.modules:
        name = f"benchmarks.{source.parent.name}"
        raise CannotBuild(f"import {name} before torch: torch looks for its devices only once")
    return ctypes.CDLL(str(library(source)))


def library(source: Path) -> Path:
    """The library of a C++ file, built if need be (5 to 10 s). It may include what lies beside it,
    and `one_device.h`.

    Raises:
        CannotBuild: what is missing, and how to get it.
    """
    torch = _torch()
    version = importlib.metadata.version("torch")
    read = [source, *sorted(source.parent.glob("*.h")), *sorted(SHARED.glob("*.h"))]
    content = b"".join(path.read_bytes() for path in read)
    digest = hashlib.sha256(content + str(torch).encode()).hexdigest()[:12]
    folder = platformdirs.user_cache_path("mpcompile") / source.parent.name
    path = folder / f"{version}-{digest}.so"
    if not path.exists():
        _compile(torch, source, path)
    return path


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuild("torch is not installed")
    torch = Path(found.origin).parent
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuild(
            "this torch is a CUDA build, which registers a CUDA device of its own: a stand-in for "
            "one needs a CPU build"
        )
    if not (torch / "include" / "ATen" / "detail" / "CUDAHooksInterface.h").exists():
        raise CannotBuild(
            f"torch's C++ headers are not in {torch / 'include'}: reinstall its wheel"
        )
    return torch


def _compile(torch: Path, source: Path, path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuild("no C++ compiler: install g++, or set CXX to one")
    include, lib = torch / "include", torch / "lib"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            compiler, "-O1", "-std=c++20", "-fPIC", "-shared", str(source), "-o", str(made),
            f"-I{SHARED}", f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
            f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}",
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            first = next((x for x in run.stderr.splitlines() if "error" in x), run.stderr[:200])
            raise CannotBuild(f"{compiler} can't compile {source.name}: {first}")
        os.replace(made, path)  # whole or not at all: two processes may build at once
