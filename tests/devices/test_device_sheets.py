"""What data sheets, instructions and `mpcompile info` say of devices, and where the version of a
driver is read: in /proc, by NVML, or nowhere.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpcompile import MPCompileError
from mpcompile.devices import cuda
from mpcompile.devices.cuda import AbsentGPU, driver_version
from mpcompile.devices.gpus import GPU
from mpcompile.devices.registry import capabilities, is_supported


@pytest.mark.parametrize(
    ("capability", "name", "expected"),
    [
        ((6, 1), "GTX 1080", "none (compute capability 6.1; they start with Volta, 7.0)"),
        ((7, 0), "V100", "FP16 (Volta, compute capability 7.0)"),
        ((7, 2), "Xavier", "FP16 (Volta, compute capability 7.2)"),
        ((7, 5), "T4", "FP16 (Turing, compute capability 7.5)"),
        ((7, 5), "NVIDIA GeForce GTX 1650", "none (GTX 16 series, compute capability 7.5)"),
        ((8, 0), "A100", "FP16, BF16, TF32 (Ampere, compute capability 8.0)"),
        ((8, 6), "RTX 3090", "FP16, BF16, TF32 (Ampere, compute capability 8.6)"),
        ((8, 9), "L40", "FP16, BF16, TF32, FP8 (Ada, compute capability 8.9)"),
        ((9, 0), "H200", "FP16, BF16, TF32, FP8 (Hopper, compute capability 9.0)"),
        ((10, 0), "B200", "FP16, BF16, TF32, FP8, FP4 (Blackwell, compute capability 10.0)"),
        ((12, 0), "RTX 5090", "FP16, BF16, TF32, FP8, FP4 (Blackwell, compute capability 12.0)"),
    ],
)
def test_tensor_cores_by_capability(capability: tuple[int, int], name: str, expected: str) -> None:
    assert AbsentGPU(GPU(name, capability, 1, 1, 1.0, 1.0, 1.0, 1)).units() == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, "AVX512-BF16"),
        (
            {"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": True},
            "AMX-BF16, AVX512-BF16",
        ),
        ({"architecture": "aarch64", "sve_bf16": True, "bf16": True}, "SVE-BF16, NEON-BF16"),
        (
            {"architecture": "x86_64", "avx2": True, "bf16": True},
            "none (no BF16 or FP16 matrix instructions)",
        ),
    ],
)
def test_matrix_units_of_a_cpu(
    flags: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpcompile.devices.cpu.cpu_flags", lambda: flags)
    assert capabilities("cpu").units() == expected


@pytest.mark.this_machine
@pytest.mark.parametrize("units", [True, False])
def test_auto_is_bf16_on_cpu(units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"architecture": "x86_64", "avx512_bf16": units}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    # What ATen itself uses here may be less.
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for limit in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(limit, raising=False)
    cpu = capabilities("cpu")
    assert cpu.auto is torch.bfloat16
    assert ("stay FP32" in cpu.why_auto()) is not units


@pytest.mark.parametrize("capability", [(6, 0), (9, 0)])
def test_auto_is_fp16_on_cuda(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    gpu = capabilities("cuda")
    assert gpu.auto is torch.float16
    expected = "products stay FP32" if capability < (7, 0) else "Tensor Cores (FP16, BF16, TF32"
    assert expected in gpu.why_auto()


def test_a_device_type_nobody_supports() -> None:
    with pytest.raises(MPCompileError, match="device type 'meta' is not supported"):
        capabilities("meta")
    assert not is_supported("meta")


@pytest.mark.gpu
@pytest.mark.by_gpu
def test_facts_of_the_gpu_at_hand() -> None:
    one = capabilities("cuda")
    assert one.auto is torch.float16
    assert one.name() == torch.cuda.get_device_name(0)
    assert set(one.libraries()) == {"CUDA", "cuDNN", "Triton"}


PROC = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
# What nvml.h declares of the four functions.
NVML = """
#include <string.h>
static int open;
int nvmlInit_v2(void) { open = 1; return STARTS; }
int nvmlShutdown(void) { open = 0; return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    if (!open || length < 80) return 1;
    strcpy(version, "535.104.05");
    return 0;
}
"""


@pytest.fixture(autouse=True)
def not_asked_before() -> Iterator[None]:
    driver_version.cache_clear()
    yield
    driver_version.cache_clear()


def library(folder: Path, starts: int = 0) -> str:
    source, built = folder / "nvml.c", folder / f"nvml{starts}.so"
    source.write_text(NVML.replace("STARTS", str(starts)))
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", built], check=True)
    return str(built)


def test_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = tmp_path / "version"
    proc.write_text(PROC)
    monkeypatch.setattr(cuda, "PROC", proc)
    assert driver_version() == "570.86.15"


def test_of_nvml_where_the_kernel_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "PROC", tmp_path / "none")
    monkeypatch.setattr(cuda, "NVML", ("libnone.so", library(tmp_path)))
    assert driver_version() == "535.104.05"


@pytest.mark.parametrize("there", [True, False], ids=["does not start", "is not there"])
def test_of_nobody(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (library(tmp_path, starts=9),) if there else ("libnone.so",)
    monkeypatch.setattr(cuda, "PROC", tmp_path / "none")
    monkeypatch.setattr(cuda, "NVML", names)
    assert driver_version() == ""
