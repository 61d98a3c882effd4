"""What data sheets, instructions and `mpcompile info` say of devices, and where the version of a
driver is read: in /proc, by NVML, or nowhere.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpcompile.devices import cuda
from mpcompile.devices.cuda import AbsentGPU, driver_version
from mpcompile.devices.gpus import GPU
from mpcompile.devices.registry import capabilities


@pytest.mark.parametrize(
    ("capability", "name", "expected"),
    [
        ((6, 0), "P100", "none (compute capability 6.0; they start with Volta, 7.0)"),
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
def test_tensor_cores_by_capability(
    capability: tuple[int, int], name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU that is there, and of one by its data sheet; "auto" is FP16 in any case."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    for one in (capabilities("cuda"), AbsentGPU(GPU(name, capability))):
        assert one.units() == expected
        assert one.has_units(torch.float16) is (not expected.startswith("none"))
        assert one.has_units(torch.bfloat16) is (capability >= (8, 0))
        assert one.auto is torch.float16
        short = expected.startswith("none")
        assert ("products stay FP32" if short else f"Tensor Cores ({expected})") in one.why_auto()
        assert one.builtin_profile() == ("cuda-hopper" if capability == (9, 0) else None)


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


def library(folder: Path, starts: int) -> str:
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


@pytest.mark.parametrize(
    ("starts", "version"), [([0], "535.104.05"), ([9], ""), ([], "")],
    ids=["it says", "it does not start", "it is not there"],
)  # fmt: skip
def test_of_nvml_where_the_kernel_says_nothing(
    starts: list[int], version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "PROC", tmp_path / "none")
    libraries = ("libnone.so", *(library(tmp_path, one) for one in starts))
    monkeypatch.setattr(cuda, "NVML", libraries)
    assert driver_version() == version
