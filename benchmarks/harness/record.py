"""The machine and the versions that were measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

import mpcompile
from mpcompile.devices.registry import capabilities

__all__ = ["environment"]


def environment(device: torch.device) -> dict[str, str]:
    """Everything a reader needs to judge or repeat the numbers; no paths, no host names."""
    one = capabilities(device)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "mpcompile": mpcompile.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(one.device),
        "name": _cpu_name() if device.type == "cpu" else one.name(),
        "instructions": ", ".join(_cpu_flags()),
        "matrix units": one.units(),
        "memory": one.memory_text(),
        **one.libraries(),
        **(_cuda_settings() if device.type == "cuda" else {}),
        "threads": str(torch.get_num_threads()),
        "load average at the start": f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores",
    }


def _cuda_settings() -> dict[str, str]:
    """What FP32 means there: torch allows TF32 in convolutions, and not in matrix products."""
    allowed = {
        "TF32 in matrix products": torch.backends.cuda.matmul.allow_tf32,
        "TF32 in convolutions": torch.backends.cudnn.allow_tf32,
    }
    return {what: "yes" if allow else "no" for what, allow in allowed.items()}


def _cpu_name() -> str:
    """The processor's own name; platform.processor() is empty on most Linux machines."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    """The vector and matrix instructions, out of the hundred flags a CPU has."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd",
              "sve", "bf16", "sme")  # fmt: skip
    present = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    return [flag for flag in wanted if flag in present]


def _cpuinfo(key: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(values, None)


def _commit() -> str:
    """The commit that was measured; `+changes` where the working tree differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "unknown"
