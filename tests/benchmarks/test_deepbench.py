"""DeepBench's shapes, and what the report makes of times."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import deepbench
from benchmarks.__main__ import main
from mpcompile.profile.cost_model import KINDS

CPU = torch.device("cpu")
PADDED = {"gemm": ("n", "k"), "conv": ("in_channels", "out_channels"), "rnn": ("input", "hidden")}


@pytest.mark.parametrize("shape", deepbench.CUDA_SHAPES, ids=lambda shape: shape.name)
def test_the_odd_size_has_one_less_where_padding_looks(shape: deepbench.Shape) -> None:
    kind = shape.aligned.kind
    names = KINDS[kind].dims
    for name, aligned, odd in zip(names, shape.aligned.dims, shape.odd.dims, strict=True):
        image = name == "in_channels" and aligned == 3
        assert aligned - odd == (name in PADDED[kind] and not image), name
    assert shape.odd.stride == shape.aligned.stride


def test_a_convolution_is_named_by_its_input() -> None:
    """DeepBench's W x H x C, N images, K filters; a stride of 2 halves the sides."""
    (shape,) = (one for one in deepbench.CPU_SHAPES if "108" in one.name)
    assert shape.name == "conv 108x108x3, N=8, K=64, 3x3, stride 2"
    assert shape.aligned.dims == (8, 3, 64, 9, 54 * 54, 1)


def test_a_gpu_has_the_shapes_of_a_cpu_and_larger_ones() -> None:
    assert set(deepbench.CPU_SHAPES) < set(deepbench.CUDA_SHAPES)
    assert deepbench.work_for(CPU).shapes == deepbench.CPU_SHAPES
    names = [shape.name for shape in deepbench.CUDA_SHAPES]
    assert len(set(names)) == len(names)


def found(low: float, told: float | None) -> deepbench.Found:
    """FP32 takes 1 s, and by the profile, too; `low` and `told` are those of the low dtype."""
    times = {
        deepbench.FULL: 1.0,
        deepbench.LOW: low,
        deepbench.ODD + deepbench.FULL: 1.0,
        deepbench.ODD + deepbench.LOW: 2 * low,
    }
    says = dict.fromkeys(deepbench.ARMS, told) | {deepbench.FULL: None if told is None else 1.0}
    return deepbench.Found({arm: [s, s] for arm, s in times.items()}, {}, says)


def test_a_verdict_is_given_where_the_dtypes_differ() -> None:
    made = {
        "right": found(0.5, 0.6), "wrong": found(0.5, 1.5), "slow": found(2.0, 1.5),
        "alike": found(0.95, 1.5), "unknown": found(0.5, None),
    }  # fmt: skip
    report = deepbench.make_report(CPU, deepbench.Work(()), made)
    held = {claim.split(":")[0]: is_so for claim, is_so in report.verdicts.items()}
    assert held == {"right": True, "wrong": False, "slow": True}
    assert next(row[0] for row in report.tables[0].rows) == "slow"  # what loses most comes first
    first = dict(zip(report.tables[0].columns, report.tables[0].rows[0], strict=False))
    assert first[f"{deepbench.LOW} over {deepbench.ODD}{deepbench.LOW}"] == "2.00x [2.00, 2.00]"


def test_an_arm_that_is_far_behind_is_shown_with_its_one_time() -> None:
    one = found(0.5, 0.5)
    slow = deepbench.Found(
        {deepbench.FULL: one.seconds[deepbench.FULL]},
        dict.fromkeys(deepbench.ARMS[1:], 20.0),
        one.predicted,
    )
    report = deepbench.make_report(CPU, deepbench.Work(()), {"gemm": slow})
    assert report.tables[0].rows[0][1] == "0.05x"
    assert report.tables[1].rows[0][2] == "20000.0, once"


def test_tiny(tmp_path: Path) -> None:
    assert main(["run", "deepbench", "--quick", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "deepbench_cpu.json").read_text())
    assert len(data["shapes"]) == len(deepbench.QUICK_SHAPES)
    for one in data["shapes"].values():
        assert one["seconds"].keys() | one["left_out"].keys() == set(deepbench.ARMS)
        seconds = [s for samples in one["seconds"].values() for s in samples]
        assert all(0 < s < math.inf for s in seconds)
