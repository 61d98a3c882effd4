"""The compiler that Inductor's code goes through on this machine, and what its code runs on."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..devices.registry import capabilities, is_supported
from ..torch_inside.inductor import setting

__all__ = ["Toolchain", "toolchain"]


@dataclass(frozen=True)
class Toolchain:
    """See above.

    Attributes:
        names: for people: `"torch 2.13.0, g++ 12.2.0"`.
        facts: what a verdict depends on.
    """

    names: str
    facts: tuple[str, ...]


def toolchain(patches: Mapping[str, Any] | None = None) -> Toolchain:
    """This machine's, with the C++ compiler that Inductor is set to; `patches` go over that."""
    cxx = (patches or {}).get("cpp.cxx", setting("cpp.cxx"))
    cxx = cxx if isinstance(cxx, str) else next(filter(None, reversed(cxx)), "")
    return _toolchain(str(cxx))


@functools.lru_cache(maxsize=8)
def _toolchain(cxx: str) -> Toolchain:
    path = shutil.which(cxx) or cxx
    version = _first_line(path)
    stamp = ""
    if Path(path).is_file():
        facts = Path(path).resolve().stat()
        stamp = f"{Path(path).resolve()} {facts.st_size} {facts.st_mtime_ns}"
    number = version.rsplit(" ", 1)[-1] if version else "?"
    there = torch.accelerator.current_accelerator(check_available=True)
    devices = [torch.device("cpu"), *([there] if there is not None else [])]
    names = [capabilities(device).name() for device in devices if is_supported(device)]
    facts_ = (version, stamp, platform.machine(), *names)
    return Toolchain(f"torch {torch.__version__}, {Path(path).name} {number}", facts_)


def _first_line(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0]
