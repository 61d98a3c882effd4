"""GPUs that torch calls "cuda": NVIDIA's, AMD's under ROCm, and absent NVIDIA GPUs by data sheet.

Sources on Tensor Cores: NVIDIA's list of compute capabilities per GPU, CUDA's table of the data
types that each generation multiplies, and the data sheets of B200, H100, L40, A100, T4 and V100.
The list of AMD targets with matrix instructions is from ROCm's "GPU hardware specifications".
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .capabilities import Capabilities, TensorCores
from .gpus import GPU

_LOW_SUMS = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}

# NVIDIA's kernel module tells its version in Linux's /proc, else NVML is asked.
PROC = Path("/proc/driver/nvidia/version")
NVML = ("libnvidia-ml.so.1", "nvml.dll")
_LONGEST = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE of nvml.h

# (first compute capability, generation, dtypes its Tensor Cores multiply, dense FP16 FLOP for each
# byte of memory traffic), newest first.
_GENERATIONS: tuple[tuple[tuple[int, int], str, str, float], ...] = (
    ((10, 0), "Blackwell", "FP16, BF16, TF32, FP8, FP4", 281),
    ((9, 0), "Hopper", "FP16, BF16, TF32, FP8", 295),
    ((8, 9), "Ada", "FP16, BF16, TF32, FP8", 209),
    ((8, 0), "Ampere", "FP16, BF16, TF32", 200),
    ((7, 5), "Turing", "FP16", 203),
    ((7, 0), "Volta", "FP16", 139),
)
_ROWS_COUNT_BEFORE = (8, 0)  # before Ampere the number of rows must be aligned, too (cuBLAS)
# An FP16 product whose rows don't start at multiples of 16 bytes runs at about half speed. The gain
# from padding GPT-2's vocabulary from 50257 to 50304 agrees with that.
_SLOWDOWN = 2.0

# AMD's targets with matrix instructions: CDNA's MFMA, RDNA 3's and 4's WMMA.
_AMD_UNITS = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


class CUDA(Capabilities):
    """An NVIDIA GPU of this machine."""

    word = "GPU"
    auto = torch.float16
    cuda_graphs = True
    convolves_low_channels_last = True  # cuDNN, on Tensor Cores
    spares_launches = True

    def capability(self) -> tuple[int, int]:
        """The compute capability, (major, minor)."""
        return torch.cuda.get_device_capability(self.device)

    def units(self) -> str:
        """Describe the Tensor Cores by the compute capability. The GTX 16 series shares 7.5 with
        Turing RTX parts but has none.
        """
        major, minor = capability = self.capability()
        dotted = f"compute capability {major}.{minor}"
        if "GTX 16" in self.name():
            return f"none (GTX 16 series, {dotted})"
        for first, generation, dtypes, _ in _GENERATIONS:
            if capability >= first:
                return f"{dtypes} ({generation}, {dotted})"
        return f"none ({dotted}; they start with Volta, 7.0)"

    def has_units(self, dtype: torch.dtype) -> bool:
        """Whether the Tensor Cores multiply in `dtype`."""
        return ("FP16" if dtype is torch.float16 else "BF16") in self.units().partition(" (")[0]

    def matrix_units(self) -> TensorCores:
        """The sizes that the Tensor Cores require of dimensions."""
        capability = self.capability()
        for first, *_, balance in _GENERATIONS:
            if capability >= first:
                rows = capability < _ROWS_COUNT_BEFORE
                return TensorCores(rows=rows, slowdown=_SLOWDOWN, balance=balance)
        return TensorCores()  # no Tensor Cores

    def why_auto(self) -> str:
        """Why "auto" is FP16."""
        if not self.has_units(self.auto):
            return super().why_auto()
        return f"FP16 runs on Tensor Cores ({self.units()}); the loss scale keeps its range"

    def products_leave_in_fp32(self) -> bool:
        """`mm.dtype` is cuBLAS's. If FP16 accumulation is allowed, torch refuses to call it."""
        return not torch.backends.cuda.matmul.allow_fp16_accumulation

    def accumulate_in_fp32(self) -> None:
        """Make cuBLAS accumulate in FP32; nothing to do for a torch without CUDA."""
        if torch.backends.cuda.is_built():
            for setting in _LOW_SUMS.values():
                setattr(torch.backends.cuda.matmul, setting, False)

    def low_accumulation(self, dtype: torch.dtype) -> str | None:
        """The setting that allows cuBLAS to add parts of a product's sums in `dtype`, or None."""
        setting = _LOW_SUMS[dtype]
        if not getattr(torch.backends.cuda.matmul, setting):
            return None
        return f"torch.backends.cuda.matmul.{setting}"

    def is_recording(self) -> bool:
        """Whether a CUDA graph is captured."""
        return torch.cuda.is_current_stream_capturing()

    def libraries(self) -> Mapping[str, str]:
        """CUDA or ROCm, cuDNN, and Triton, which Inductor needs."""
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return {
            "CUDA": str(torch.version.cuda or torch.version.hip),
            "cuDNN": "no" if cudnn is None else str(cudnn),
            "Triton": _triton_version(),
        }

    def driver(self) -> str:
        """The version of NVIDIA's kernel module; `""` where it can't be asked."""
        return driver_version()

    def builtin_profile(self) -> str | None:
        """The built-in profile for the compute capability, or None."""
        return "cuda-hopper" if self.capability()[0] == 9 else None


class ROCm(CUDA):
    """An AMD GPU, which torch built for ROCm calls "cuda". NVIDIA's facts don't hold for it:
    compute capabilities, sizes for Tensor Cores, layouts, `mm.dtype`, the built-in profiles.
    """

    convolves_low_channels_last = False  # MIOpen: unknown

    def units(self) -> str:
        """Describe the matrix cores."""
        target = self._target()
        found = "FP16, BF16" if target.startswith(_AMD_UNITS) else "none known to mpcompile"
        return f"{found} (AMD {target})"

    def has_units(self, dtype: torch.dtype) -> bool:
        """Whether it is one of AMD's targets with matrix instructions."""
        return self._target().startswith(_AMD_UNITS)

    def matrix_units(self) -> TensorCores:
        """No requirement: the cost of unaligned sizes is unknown, so nothing is padded."""
        return TensorCores()

    def products_leave_in_fp32(self) -> bool:
        """False: only CUDA has `mm.dtype`."""
        return False

    def builtin_profile(self) -> str | None:
        """None: no AMD GPU was measured."""
        return None

    def _target(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).gcnArchName)


class AbsentGPU(CUDA):
    """An NVIDIA GPU that need not be present: its capabilities follow from its data sheet."""

    def __init__(self, gpu: GPU) -> None:
        super().__init__(torch.device("cuda", 0))
        self.gpu = gpu

    def capability(self) -> tuple[int, int]:
        """The compute capability, (major, minor)."""
        return self.gpu.capability

    def name(self) -> str:
        """The name that `torch.cuda.get_device_name()` would return."""
        return self.gpu.name


def cuda_or_rocm(device: torch.device) -> CUDA:
    """The capabilities of a "cuda" device: NVIDIA's or AMD's, by what torch was built for."""
    return CUDA(device) if torch.version.hip is None else ROCm(device)


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "no (Inductor needs it to compile for CUDA)"


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
