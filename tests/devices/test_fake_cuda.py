"""What happens on a GPU, seen without one: plans, dtypes, devices, and who waits for the device.

`fakecuda` makes a device that exists by name only; each GPU is a process of its own.
"""

from collections.abc import Callable
from typing import Any

import pytest
from gpu_models import MODELS, lines_of
from gpus_by_name import needs_a_cpu_build, told

from mpcompile import plan_for

GPUS = ["h100", "t4", "v100"]

pytestmark = [
    pytest.mark.slow("trains each model on a GPU by name, in a process of its own"),
    pytest.mark.inside,
    needs_a_cpu_build,
]


def trained(gpu: str) -> list[dict[str, Any]]:
    """What tests/support/fake_cuda_training.py tells of each model, level and optimizer."""
    return told("fake_cuda_training.py", gpu)


each_gpu: Callable[..., Any] = pytest.mark.parametrize("gpu", GPUS)


@pytest.mark.sampled(3)
@each_gpu
def test_a_first_compile_for_cuda_at_every_level(gpu: str) -> None:
    for run in trained(gpu):
        assert run["graphs"] == 1
        assert (run["dtype"], run["device"], run["scaled"]) == ("float16", "cuda:0", True), run
        assert run["loss"] == "torch.float32 on cuda:0"


@pytest.mark.sampled(3)
@each_gpu
def test_nobody_waits_for_the_device(gpu: str) -> None:
    """The first steps find the scale. From then on a generated step reads nothing; a plain
    optimizer's step, which the host must be able to leave out, reads one flag.
    """
    for run in trained(gpu):
        assert run["reads"][1:] == [0 if run["generated"] else 1] * 2, run["last read"]


@each_gpu
def test_gradients_are_where_they_should_be(gpu: str) -> None:
    for run in trained(gpu):
        wanted = {"torch.float32 on cuda:0"}
        assert set(run["gradients"]) == wanted


@pytest.mark.sampled(3)
@each_gpu
def test_a_plan_without_the_device_says_the_same(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan_for` on the CPU, to the letter: every node, cast, pad, reason and product. Left out are
    copies of what a kernel of the device lays out otherwise: flash attention's result.
    """
    monkeypatch.setenv("MPCOMPILE_PROFILE", "")
    for run in trained(gpu):
        model, batch = MODELS[run["model"]]()
        planned = plan_for(
            model, *batch(), device=gpu, level=run["level"], mp_optimizer=run["generated"]
        )
        assert [_without_layouts(lines_of(plan)) for plan in planned.graphs] == [
            _without_layouts(run["plan"])
        ]
        assert not planned.left


def _without_layouts(plan: list[str]) -> list[str]:
    return [line for line in plan if "in the layout that it was captured" not in line]


def plans(gpu: str) -> str:
    """The products of each model, in the shapes they run in: the same at both levels."""
    found: dict[str, list[str]] = {}
    for run in trained(gpu):
        if run["generated"]:
            assert found.setdefault(run["model"], run["products"]) == run["products"]
    return "\n".join(line for model, products in found.items() for line in (model, *products))


@pytest.mark.parametrize(("gpu", "rows"), [("h100", 4095), ("t4", 4096), ("v100", 4096)])
def test_plans(gpu: str, rows: int) -> None:
    """Before Ampere the number of rows counts, too: they are padded as well. By the estimate of an
    H100 the last product, which is small, would be FP32; no estimate makes it so.
    """
    expected = f"""\
mlp
linear: f16[{rows}, 4096] LOW
linear_1: f16[{rows}, 1008] LOW
gpt
linear: f16[16, 128, 2304] LOW
scaled_dot_product_attention: f16[16, 6, 128, 128] LOW
linear_1: f16[16, 128, 768] LOW
linear_2: f16[16, 128, 3072] LOW
linear_3: f16[16, 128, 768] LOW
linear_4: f16[16, 128, 1008] LOW
conv
conv2d: f16[64, 128, 56, 56] LOW
conv2d_1: f16[64, 136, 26, 26] LOW
linear: f16[64, 10] LOW"""
    assert plans(gpu) == expected
