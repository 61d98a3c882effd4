"""What a device can do: the low dtype that ``dtype="auto"`` means there, and its matrix units.

Facts only: nothing here is timed, and no choice depends on anything but the device and what oneDNN
and ATen are told to use of it. Sources: NVIDIA's list of compute capabilities per GPU, and CUDA's
table of the data types each Tensor Core generation multiplies; AMD's list of targets with matrix
instructions (ROCm, "GPU hardware specifications"); for CPUs, the flags that ``torch.cpu`` reads,
and oneDNN's "CPU dispatcher control".
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ..errors import MPCompileError

__all__ = [
    "AUTO",
    "SUPPORTED",
    "DeviceFacts",
    "TensorCores",
    "auto_dtype",
    "cpu_flags",
    "cpu_matrix_units",
    "cuda_matrix_units",
    "cuda_tensor_cores",
    "default_device",
    "device_facts",
    "has_units",
    "matrix_units",
    "multiply_in",
    "tensor_cores",
]

SUPPORTED = ("cuda", "cpu")
"""The device types that mpcompile compiles for."""

AUTO = {"cuda": torch.float16, "cpu": torch.bfloat16}
"""The low dtype that ``dtype="auto"`` stands for, by device type."""

# (first compute capability, generation, what its Tensor Cores multiply), newest first.
_GENERATIONS: tuple[tuple[tuple[int, int], str, str], ...] = (
    ((10, 0), "Blackwell", "FP16, BF16, TF32, FP8, FP4"),
    ((9, 0), "Hopper", "FP16, BF16, TF32, FP8"),
    ((8, 9), "Ada", "FP16, BF16, TF32, FP8"),
    ((8, 0), "Ampere", "FP16, BF16, TF32"),
    ((7, 5), "Turing", "FP16"),
    ((7, 0), "Volta", "FP16"),
)

# AMD's targets with matrix instructions: CDNA's MFMA, RDNA 3's and 4's WMMA.
_AMD_UNITS = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")

# (first compute capability, dense FP16 FLOP per byte of memory traffic), newest first: NVIDIA's
# data sheets of B200, H100, L40, A100, T4 and V100. Before Ampere the rows count too (cuBLAS).
_BALANCE: tuple[tuple[tuple[int, int], float], ...] = (
    ((10, 0), 281), ((9, 0), 295), ((8, 9), 209), ((8, 0), 200), ((7, 5), 203), ((7, 0), 139),
)  # fmt: skip
_ROWS_COUNT_BEFORE = (8, 0)
# An FP16 product whose rows don't start at multiples of 16 bytes runs at about half speed: what
# padding GPT-2's vocabulary from 50257 to 50304 gains agrees with it.
_SLOWDOWN = 2.0

# CPU flags that mean "a dot-product or tile instruction in this dtype", best first:
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

# What oneDNN may be told to stay below (the variable, in either spelling), lowest first; and what
# each CPU flag needs of it. Nothing else multiplies in BF16 or FP16 on a CPU at speed.
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


@dataclasses.dataclass(frozen=True)
class TensorCores:
    """What the matrix units of a device ask of dimensions, and what they lose without it.

    Attributes:
        alignment: bytes that the stride of a row must be a multiple of (16 for every Tensor Core
            generation: 8 FP16 values; NVIDIA's mixed-precision guide).
        rows: whether the number of rows, which is no stride, must be a multiple too.
        slowdown: by which factor an unaligned product runs longer; 1: no difference.
        balance: FLOP that the units do in the time of one byte of memory traffic.
    """

    alignment: int = 16
    rows: bool = False
    slowdown: float = 1.0
    balance: float = 1.0


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """Everything ``mpcompile info`` says about one device, as text.

    Attributes:
        device: the torch name, e.g. ``"cuda:0"``.
        name: the maker's name of the part.
        dtype: what ``dtype="auto"`` chooses here.
        reason: why.
        matrix_units: the hardware that multiplies in a low dtype, or that there is none.
        memory: how much of it there is, in GiB, or ``"unknown"``.
        libraries: the math libraries torch was built with and found, by name.
    """

    device: str
    name: str
    dtype: torch.dtype
    reason: str
    matrix_units: str
    memory: str
    libraries: Mapping[str, str]


def default_device() -> torch.device:
    """Return the first CUDA device where there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def auto_dtype(device: torch.device | str) -> tuple[torch.dtype, str]:
    """Return the low dtype that ``dtype="auto"`` stands for on ``device``, and why.

    Whether products run in it there is another question: see `has_units`.

    Raises:
        MPCompileError: the device type is not one of `SUPPORTED`.
    """
    device = _supported(device)
    low = AUTO[device.type]
    if not has_units(device, low):
        short = "FP16" if low is torch.float16 else "BF16"
        return low, f"nothing multiplies {short} fast here: products stay FP32, unless measured"
    if device.type == "cuda":
        units = tensor_cores(device)
        return low, f"FP16 runs on Tensor Cores ({units}); the loss scale keeps its range"
    first = next(name for name, dtype in _cpu_units() if dtype is low)
    return low, f"BF16 has instructions of its own here ({first}), FP16 is slow"


def has_units(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether ``device`` has hardware that multiplies matrices in ``dtype``: a data sheet's word.

    Raises:
        MPCompileError: the device type is not one of `SUPPORTED`.
    """
    device = _supported(device)
    if device.type == "cpu":
        return any(found is dtype for _, found in _cpu_units())
    if torch.version.hip is not None:
        return _gfx(device).startswith(_AMD_UNITS)
    return multiply_in(tensor_cores(device), dtype)


def multiply_in(units: str, dtype: torch.dtype) -> bool:
    """Whether Tensor Cores, as `cuda_tensor_cores` describes them, multiply in FP16 or BF16."""
    return ("FP16" if dtype is torch.float16 else "BF16") in units.partition(" (")[0]


def tensor_cores(device: torch.device | str) -> str:
    """Describe the hardware of ``device`` that multiplies low-precision matrices.

    The answer starts with ``"none"`` where there is no such hardware.

    Raises:
        MPCompileError: the device type is not one of `SUPPORTED`.
    """
    device = _supported(device)
    if device.type == "cpu":
        return cpu_matrix_units(cpu_flags())
    if torch.version.hip is not None:
        found = "FP16, BF16" if _gfx(device).startswith(_AMD_UNITS) else "none known to mpcompile"
        return f"{found} (AMD {_gfx(device)})"
    return cuda_tensor_cores(
        torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    )


def cuda_tensor_cores(capability: tuple[int, int], name: str = "") -> str:
    """Describe the Tensor Cores of an NVIDIA GPU by its compute capability.

    ``name`` matters for one family: the GTX 16 series shares 7.5 with Turing RTX parts but has
    no Tensor Cores.
    """
    dotted = f"compute capability {capability[0]}.{capability[1]}"
    if "GTX 16" in name:
        return f"none (GTX 16 series, {dotted})"
    for first, generation, dtypes in _GENERATIONS:
        if capability >= first:
            return f"{dtypes} ({generation}, {dotted})"
    return f"none ({dotted}; they start with Volta, 7.0)"


def cpu_flags() -> Mapping[str, Any]:
    """``torch.cpu.get_capabilities()``, less what ``ONEDNN_MAX_CPU_ISA`` and
    ``ATEN_CPU_CAPABILITY`` keep oneDNN and ATen from using.
    """
    flags = dict(torch.cpu.get_capabilities())
    told = next((os.environ[v] for v in _ONEDNN_LIMITS if os.environ.get(v)), "").upper()
    if told in _ONEDNN_LEVELS:  # oneDNN passes over any other
        level = _ONEDNN_LEVELS.index(told)
        barred = [f for f, need in _ONEDNN_NEEDS.items() if _ONEDNN_LEVELS.index(need) > level]
        flags.update(dict.fromkeys(barred, False))
    if str(flags.get("architecture", "")).startswith("x86") and _vectors() in ("AVX2", "DEFAULT"):
        flags.update(dict.fromkeys(_ONEDNN_NEEDS, False))
    return flags


def cpu_matrix_units(capabilities: Mapping[str, Any]) -> str:
    """Describe the low-precision dot-product instructions of a CPU.

    ``capabilities`` has the form of ``torch.cpu.get_capabilities()``.
    """
    names = [name for name, _ in _cpu_units(capabilities)]
    return ", ".join(names) if names else "none (no BF16 or FP16 matrix instructions)"


def matrix_units(device: torch.device | str) -> TensorCores:
    """What the matrix units of ``device`` ask of dimensions.

    CPU kernels repack their operands, so nothing is lost there by odd sizes.

    Raises:
        MPCompileError: the device type is not one of `SUPPORTED`.
    """
    device = _supported(device)
    if device.type != "cuda":
        return TensorCores()
    return cuda_matrix_units(torch.cuda.get_device_capability(device))


def cuda_matrix_units(capability: tuple[int, int]) -> TensorCores:
    """What the Tensor Cores of an NVIDIA GPU ask of dimensions, by its compute capability."""
    for first, balance in _BALANCE:
        if capability >= first:
            rows = capability < _ROWS_COUNT_BEFORE
            return TensorCores(rows=rows, slowdown=_SLOWDOWN, balance=balance)
    return TensorCores()  # no Tensor Cores


def device_facts(device: torch.device | str | None = None) -> DeviceFacts:
    """Collect the facts of one device (default: `default_device`).

    Raises:
        MPCompileError: the device type is not one of `SUPPORTED`.
    """
    device = default_device() if device is None else _supported(device)
    dtype, reason = auto_dtype(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, f"{properties.total_memory / 2**30:.1f} GiB"
    else:
        capabilities = torch.cpu.get_capabilities()
        model = capabilities.get("cpu_name") or platform.processor() or platform.machine()
        name = f"{model}, {torch.get_num_threads()} threads"
        memory = _host_memory()
    return DeviceFacts(
        device=str(device),
        name=name,
        dtype=dtype,
        reason=reason,
        matrix_units=tensor_cores(device),
        memory=memory,
        libraries=_libraries(device),
    )


def _supported(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in SUPPORTED:
        raise MPCompileError(
            f"device type {device.type!r} is not supported; mpcompile works on "
            f"{' and '.join(SUPPORTED)}: move the model there first"
        )
    return device


def _cpu_units(capabilities: Mapping[str, Any] | None = None) -> list[tuple[str, torch.dtype]]:
    if capabilities is None:
        capabilities = cpu_flags()
    architecture = str(capabilities.get("architecture", platform.machine())).lower()
    return [
        (name, dtype)
        for prefixes, flag, name, dtype in _CPU_UNITS
        if architecture.startswith(prefixes) and capabilities.get(flag)
    ]


def _vectors() -> str:
    """What ATen's kernels use: ``"AVX512"``, ``"AVX2"``, ``"DEFAULT"``, names of other makers."""
    return torch.backends.cpu.get_cpu_capability()


def _gfx(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).gcnArchName)


def _host_memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def _libraries(device: torch.device) -> Mapping[str, str]:
    if device.type == "cpu":
        return {
            "oneDNN": "yes" if torch.backends.mkldnn.is_available() else "no",
            "MKL": "yes" if torch.backends.mkl.is_available() else "no",
            "vectors": _vectors(),
        }
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "CUDA": str(torch.version.cuda or torch.version.hip),
        "cuDNN": "no" if cudnn is None else str(cudnn),
        "Triton": _triton_version(),
    }


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "no (Inductor needs it to compile for CUDA)"
