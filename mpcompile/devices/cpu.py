"""The host's CPU: a call returns when its work is done. Its low-precision instructions decide what
is fast, as far as settings let oneDNN and ATen use them.

Sources: the flags that ``torch.cpu`` reads, and oneDNN's "CPU dispatcher control".
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .capabilities import Capabilities
from .torch_faults import SHALLOW_VOLUMES

# CPU flags that stand for a dot-product or tile instruction in some dtype, best first:
# (architecture prefixes, flag of torch.cpu.get_capabilities(), name, dtype).
_CPU_UNITS: tuple[tuple[tuple[str, ...], str, str, torch.dtype], ...] = (
    (("x86",), "amx_bf16", "AMX-BF16", torch.bfloat16),
    (("x86",), "avx512_bf16", "AVX512-BF16", torch.bfloat16),
    (("aarch", "arm"), "sme2", "SME2", torch.bfloat16),
    (("aarch", "arm"), "sve_bf16", "SVE-BF16", torch.bfloat16),
    (("aarch", "arm"), "bf16", "NEON-BF16", torch.bfloat16),
    (("x86",), "amx_fp16", "AMX-FP16", torch.float16),
    (("x86",), "avx512_fp16", "AVX512-FP16", torch.float16),
)

# The environment variables (two spellings) that limit oneDNN's instructions, their levels, lowest
# first, and the level that each CPU flag needs. Only oneDNN is fast in BF16 and FP16 on CPUs.
_ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_ONEDNN_LEVELS = (
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI",
    "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16",
)  # fmt: skip
_ONEDNN_NEEDS = {
    "avx512_f": "AVX512_CORE",
    "avx512_bf16": "AVX512_CORE_BF16",
    "avx512_fp16": "AVX512_CORE_FP16",
    "amx_bf16": "AVX512_CORE_AMX",
    "amx_fp16": "AVX512_CORE_AMX_FP16",
}

# (flag of `cpu_flags()`, built-in profile), best first
_PROFILES = (
    ("amx_bf16", "cpu-amx-bf16"), ("avx512_bf16", "cpu-avx512-bf16"),
    ("avx512_f", "cpu-avx512"), ("avx2", "cpu-avx2"),
)  # fmt: skip


class CPU(Capabilities):
    """The CPU. Its kernels repack their operands, so unaligned sizes cost nothing."""

    word = "CPU"
    auto = torch.bfloat16
    slow_dtypes = (torch.float16,)
    asynchronous = False
    multi_tensor = False
    fewest_rows = 256  # fewer operations for each byte than a GPU
    turn = 1e-4
    # Memory that a step frees goes back to the system, and is paged in again in the next one.
    recomputes = True
    slow_bools = True
    convolves_channels_last = True  # for oneDNN
    # oneDNN reads a BF16 matrix for one row at half the rate of an FP32 one, or less: measured with
    # torch 2.13 and AMX, over 5 sizes in both layouts, 0.85 to 1.62 times FP32's time.
    one_row = 1.2
    wants_alignment = False

    def units(self) -> str:
        """Describe the low-precision dot-product instructions."""
        names = [name for name, _ in cpu_units(cpu_flags())]
        return ", ".join(names) if names else "none (no BF16 or FP16 matrix instructions)"

    def has_units(self, dtype: torch.dtype) -> bool:
        """Whether there are instructions that multiply in `dtype`."""
        return any(found is dtype for _, found in cpu_units(cpu_flags()))

    def why_auto(self) -> str:
        """Why "auto" is BF16."""
        names = [name for name, dtype in cpu_units(cpu_flags()) if dtype is self.auto]
        if not names:
            return super().why_auto()
        return f"BF16 has instructions of its own here ({names[0]}), FP16 is slow"

    def has_slow_attention(self, dtype: torch.dtype) -> bool:
        """True for BF16: its backward runs at a fraction of FP32's speed (torch 2.13)."""
        return dtype is torch.bfloat16

    def miscounts_shallow_volumes(self, dtype: torch.dtype) -> bool:
        """True for BF16, in the releases of torch whose oneDNN has this fault."""
        return dtype is torch.bfloat16 and SHALLOW_VOLUMES.is_here()

    def is_there(self) -> bool:
        """Always."""
        return True

    def count(self) -> int:
        """0: the host's device has no index."""
        return 0

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def is_shared(self, memory: torch.UntypedStorage) -> bool:
        """Whether it was put into shared memory."""
        return memory.is_shared()

    def random_state(self) -> torch.Tensor:
        """The state of the host's random number generator."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore a state that `random_state` returned."""
        torch.set_rng_state(state)

    def name(self) -> str:
        """The model, and the number of threads that torch computes with."""
        return f"{self._model()}, {torch.get_num_threads()} threads"

    def part(self) -> str:
        """The maker's name, which a virtual machine may shorten, and the instructions of products.

        Without matrix units these are its vectors: other vectors make other dtypes fast.
        """
        units = self.units().partition(" (")[0]
        return f"{self._model()} ({vectors() if units == 'none' else units})"

    def memory(self) -> int | None:
        """The host's memory."""
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # not a POSIX system
            return None

    def free_memory(self) -> int | None:
        """What the host could give without swapping; None where it doesn't tell as Linux does."""
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            facts = dict(line.split(":", 1) for line in lines)
            return 1024 * int(facts["MemAvailable"].split()[0])
        except (OSError, KeyError, ValueError):
            return None

    def libraries(self) -> Mapping[str, str]:
        """The libraries of matrix products, and the vector instructions that ATen uses."""
        return {
            "oneDNN": "yes" if torch.backends.mkldnn.is_available() else "no",
            "MKL": "yes" if torch.backends.mkl.is_available() else "no",
            "vectors": vectors(),
        }

    def threads(self) -> int:
        """How many threads torch computes with."""
        return torch.get_num_threads()

    def builtin_profile(self) -> str | None:
        """For an x86 CPU, the best of `_PROFILES` whose instructions it has.

        Its BF16 instructions, or else its vectors, decide which dtype is fast at which size. A CPU
        with AMX also has AVX512-BF16 and gets that profile, which promises too little. The ratio of
        two dtypes' times, on which choices depend, is about the same for any number of threads at
        large sizes; at small sizes BF16 starts to win at about twice the work. Other CPUs have no
        built-in profile: with BF16 instructions their products run low, without them in FP32.
        """
        flags = cpu_flags()
        if not str(flags.get("architecture", "")).startswith("x86"):
            return None
        return next((profile for flag, profile in _PROFILES if flags.get(flag)), None)

    def _model(self) -> str:
        return str(cpu_flags().get("cpu_name") or platform.processor() or platform.machine())


def cpu_flags() -> Mapping[str, Any]:
    """``torch.cpu.get_capabilities()``, without the flags that ``ONEDNN_MAX_CPU_ISA`` and
    ``ATEN_CPU_CAPABILITY`` keep oneDNN and ATen from using.
    """
    flags = dict(torch.cpu.get_capabilities())
    told = next((os.environ[v] for v in _ONEDNN_LIMITS if os.environ.get(v)), "").upper()
    if told in _ONEDNN_LEVELS:  # oneDNN ignores any other value
        level = _ONEDNN_LEVELS.index(told)
        barred = [f for f, need in _ONEDNN_NEEDS.items() if _ONEDNN_LEVELS.index(need) > level]
        flags.update(dict.fromkeys(barred, False))
    if str(flags.get("architecture", "")).startswith("x86") and vectors() in ("AVX2", "DEFAULT"):
        flags.update(dict.fromkeys(_ONEDNN_NEEDS, False))
    return flags


def cpu_units(flags: Mapping[str, Any]) -> list[tuple[str, torch.dtype]]:
    """The names and dtypes of the instructions that multiply in a low dtype, best first.

    ``flags`` has the form of ``torch.cpu.get_capabilities()``.
    """
    architecture = str(flags.get("architecture", platform.machine())).lower()
    return [
        (name, dtype)
        for prefixes, flag, name, dtype in _CPU_UNITS
        if architecture.startswith(prefixes) and flags.get(flag)
    ]


def vectors() -> str:
    """The vectors that ATen's kernels use: ``"AVX512"``, ``"AVX2"``, ``"DEFAULT"`` or others."""
    return torch.backends.cpu.get_cpu_capability()
