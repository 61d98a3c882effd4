"""The version of NVIDIA's kernel module, asked where it can be: in Linux's /proc, else of NVML."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

__all__ = ["driver_version"]

PROC = Path("/proc/driver/nvidia/version")
NVML = ("libnvidia-ml.so.1", "nvml.dll")
_LONGEST = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE of nvml.h


@functools.cache
def driver_version() -> str:
    """The version, such as "570.86.15"; `""` where neither is there, as under ROCm.

    A container may have the driver's libraries without its part of /proc.
    """
    return _from_proc() or _from_nvml()


def _from_proc() -> str:
    try:
        text = PROC.read_text()
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found.group(1) if found else ""


def _from_nvml() -> str:
    for name in NVML:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        text = ctypes.create_string_buffer(_LONGEST)
        if library.nvmlInit_v2() != 0:
            continue
        try:
            if library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_LONGEST)) == 0:
                return text.value.decode()
        finally:
            library.nvmlShutdown()
    return ""
