"""The driver's version: from /proc, from NVML, or not known."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpcompile.devices import cuda
from mpcompile.devices.cuda import driver_version

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
