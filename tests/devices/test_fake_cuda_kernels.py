"""The kernels that Inductor generates, compiled for GPUs that this machine does not have.

`pytest -m sweep`; needs Triton, which compiles for any GPU on a machine without one.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from gpus_by_name import needs_a_cpu_build, told

TARGETS = {"h100": "sm_90a", "a100": "sm_80", "t4": "sm_75"}

pytestmark = [
    pytest.mark.sweep("compiles kernels for GPUs, with Triton"),
    needs_a_cpu_build,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="Triton is not installed: pip install --no-deps triton==3.7.1, for torch 2.13",
    ),
]


def trained(gpu: str) -> list[dict[str, Any]]:
    """What tests/support/fake_cuda_kernels.py tells of each model and level."""
    return told("fake_cuda_kernels.py", gpu)


each_gpu: Callable[..., Any] = pytest.mark.parametrize("gpu", TARGETS)


@each_gpu
def test_all_kernels_compile_and_nothing_is_spilled(gpu: str) -> None:
    for run in trained(gpu):
        compiled = {kernel["name"] for kernel in run["kernels"]}
        assert {*run["launched"], *run["launched by the step"]} <= compiled
        for kernel in run["kernels"]:
            assert kernel["target"] == TARGETS[gpu]
            assert 0 < kernel["resources"]["registers"] <= 255
            assert kernel["resources"]["stack"] == kernel["resources"]["local"] == 0, kernel


@each_gpu
def test_the_step_updates_all_parameters_in_a_few_kernels(gpu: str) -> None:
    """Design note 5: on CUDA the update is one multi-tensor kernel, and so are the counters.

    Where a gradient lies in memory otherwise than its parameter, as that of a padded weight, its
    update is tiled otherwise and becomes a kernel of its own.
    """
    for run in trained(gpu):
        step = run["launched by the step"]
        lists = sum(n for name, n in step.items() if name.startswith("triton_for_"))
        assert lists >= 2, step
        assert sum(step.values()) <= 7, (run["model"], run["level"], step)


@each_gpu
def test_casts_hardly_add_kernels(gpu: str) -> None:
    """At O2 what a model is given and returns is cast, and at most one weight that has a second
    reader; at O1 weights are, too, as under autocast.
    """
    for run in trained(gpu):
        names = run["launched"]
        casts = sum(
            n for name, n in names.items() if name.startswith("triton_poi_fused__to_copy_")
            and name.removeprefix("triton_poi_fused__to_copy_").isdigit()
        )  # fmt: skip
        most = 2 if run["level"] == "O2" else run["parameters"]
        assert casts <= most, (run["model"], run["level"], names)
