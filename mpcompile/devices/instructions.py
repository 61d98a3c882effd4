"""The low-precision instructions of CPUs, as far as settings let oneDNN and ATen use them.

Sources: the flags that ``torch.cpu`` reads, and oneDNN's "CPU dispatcher control".
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["cpu_flags", "cpu_units", "vectors"]

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
