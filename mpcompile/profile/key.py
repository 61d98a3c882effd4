"""What a profile is valid for: one part, one build of torch, one driver, one number of threads."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

import torch

from ..devices.facts import SUPPORTED, cpu_flags, cpu_matrix_units
from ..errors import MPCompileError
from .model import Profile, Sample

__all__ = ["Key", "class_of", "class_of_gpu", "key_of"]


@dataclass(frozen=True)
class Key:
    """The fields of a `Profile` that must agree with the device at hand."""

    device: str
    device_type: str
    torch_version: str
    driver: str
    threads: int

    @property
    def filename(self) -> str:
        """Readable, and different for every key."""
        words = re.sub(
            r"[^a-z0-9.]+", "-", f"{self.device}-torch-{self.torch_version}".lower()
        ).strip("-")
        digest = hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:8]
        return f"{words}-{digest}.json"

    def profile(self, samples: Iterable[Sample]) -> Profile:
        return Profile(**asdict(self), samples=tuple(samples))

    def fits(self, profile: Profile) -> bool:
        return all(
            getattr(profile, field.name) == getattr(self, field.name) for field in fields(self)
        )


def key_of(device: torch.device) -> Key:
    """The key of a device of this machine.

    Raises:
        MPCompileError: the device type is not supported.
    """
    if device.type == "cpu":
        return Key(_cpu_name(), "cpu", torch.__version__, "", torch.get_num_threads())
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Key(name, "cuda", torch.__version__, _driver(), 0)
    raise MPCompileError(
        f"device type {device.type!r} is not supported; "
        f"mpcompile works on {' and '.join(SUPPORTED)}"
    )


def class_of(device: torch.device) -> str | None:
    """The built-in profile, by its file's stem, that comes closest to a device; None for none.

    An x86 CPU is classed by the best of `_CPU_CLASSES` it has: its BF16 instructions, or else its
    vectors, decide which dtype is fast at which size. One with AMX has AVX512-BF16 too and gets
    that profile, which promises it too little. The ratio of two dtypes, which a choice depends on,
    is about the same with any number of threads for large sizes; for small ones BF16 starts to win
    at about twice the work. Other CPUs have no built-in profile: with BF16 instructions their
    products run low, without them in FP32. A GPU is classed by its compute capability.
    """
    if device.type == "cpu":
        flags = cpu_flags()
        x86 = str(flags.get("architecture", "")).startswith("x86")
        return next((c for flag, c in _CPU_CLASSES if flags.get(flag)), None) if x86 else None
    if device.type == "cuda" and torch.version.hip is None:
        return class_of_gpu(torch.cuda.get_device_capability(device))
    return None


def class_of_gpu(capability: tuple[int, int]) -> str | None:
    """The same for an NVIDIA GPU, by its compute capability."""
    return "cuda-hopper" if capability[0] == 9 else None


# (flag of `cpu_flags()`, built-in profile), best first
_CPU_CLASSES = (
    ("avx512_bf16", "cpu-avx512-bf16"), ("avx512_f", "cpu-avx512"), ("avx2", "cpu-avx2"),
)  # fmt: skip


def _cpu_name() -> str:
    """The maker's name, which a virtual machine may shorten, so what it multiplies with stands by.

    Without matrix units these are its vectors: what is fast with one kind is not with another.
    """
    flags = cpu_flags()
    name = flags.get("cpu_name") or platform.processor() or platform.machine()
    units = cpu_matrix_units(flags).partition(" (")[0]
    return f"{name} ({torch.backends.cpu.get_cpu_capability() if units == 'none' else units})"


def _driver() -> str:
    """The version of NVIDIA's kernel module; torch does not tell. Empty where Linux does not."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found.group(1) if found else ""
