"""costs: what the times of a device profile make of products."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from compare import LEVELS, leaf
from planned_programs import BF16, CROSSING, FP16, PROGRAMS, both, profile_of, staged
from torch import nn

import mpcompile
from mpcompile import ir
from mpcompile.planner import target
from mpcompile.profile import Profile
from mpcompile.rules.policy import Precision


@LEVELS
def test_without_a_profile_products_stay_low(level: str) -> None:
    for name in PROGRAMS:
        torch._dynamo.reset()
        module, inputs = PROGRAMS[name]
        stage = staged(module(), inputs(), level=level, low=BF16)
        products = [n for n in stage.gm.graph.nodes if ir.precision(n) is Precision.LOW]
        stage.run()
        assert products
        assert all(ir.precision(n) is Precision.LOW for n in products)


class SmallAndLarge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(256, 256), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.large(x).exp(), self.small(y).exp()


@LEVELS
def test_a_small_product_is_fp32_where_that_is_faster(level: str) -> None:
    inputs = leaf(256, 256), leaf(16, 16)
    stage = staged(SmallAndLarge(), *inputs, level=level, low=BF16, profile=CROSSING)
    stage.run()
    large, small = stage.mark("linear"), stage.mark("linear_1")
    assert (large.precision, large.rule) == (Precision.LOW, "table")
    assert (small.precision, small.rule) == (Precision.FULL, "plan")
    verdict = small.reason.partition("; but ")[2]
    assert verdict.startswith("FP32 is faster: 0.01 ms, low 0.04 ms")
    assert verdict.endswith("(device profile)")


def test_a_small_model_on_a_gpu_is_told_how_large_a_batch_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both sides of the sum, the verdict first; and a plan for that batch agrees."""
    monkeypatch.setenv("MPCOMPILE_PROFILE", "")  # the built-in one

    def planned(batch: int) -> tuple[str, str]:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        plan = mpcompile.explain(model, torch.randn(batch, 64), device="h100")
        first = next(node for node in plan.nodes if node.op == "aten::linear")
        return first.precision, first.reason

    precision, reason = planned(32)
    assert precision == "FULL"
    found = re.search(
        r"; but FP32 costs less: ([\d.]+) ms, low ([\d.]+) ms and ([\d.]+) ms for the casts it "
        r"needs; from about (\d+) times the batch on, low pays \(device profile\)$",
        reason,
    )
    assert found is not None
    full, low, casts = map(float, found.groups()[:3])
    assert low < full < low + casts
    pays = int(found[4]) * 32
    assert planned(pays)[0] == "LOW"
    assert planned(pays // 4)[0] == "FULL"


@LEVELS
def test_a_small_product_between_large_ones_is_low(level: str) -> None:
    """To cast in front of it and behind it would cost more than it saves."""

    class Sandwich(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(256, 256), nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.outer(self.inner(self.outer(x)))
            return out.exp()

    dims = (1, 256, 256, 256)
    even = profile_of(*both("gemm", dims, low=500e-6, full=499e-6))
    stage = staged(Sandwich(), leaf(256, 256), level=level, low=BF16, profile=even)
    for name in ("linear", "linear_2"):
        low = replace(stage.mark(name), by=ir.By.POLICY, reason="wanted so")
        ir.set_mark(stage.node(name), low)
    stage.run()
    assert stage.mark("linear_1").precision is Precision.LOW


@pytest.mark.parametrize(("rows", "trains", "expected"), [
    (1, False, Precision.FULL),
    (2, False, Precision.LOW),
    (1, True, Precision.LOW),  # its backward has larger products
])  # fmt: skip
def test_one_row_is_no_faster_low_on_a_cpu(rows: int, trains: bool, expected: Precision) -> None:
    """A language model's token: all of the time goes into reading the weight."""
    faster = profile_of(*both("gemm", (1, 8, 256, 256), low=1e-3, full=4e-3))
    with torch.set_grad_enabled(trains):
        x = torch.randn(rows, 256)
        stage = staged(nn.Linear(256, 256), x, level="O1", low=BF16, profile=faster)
        stage.run()
    assert stage.mark("linear").precision is expected


def test_the_profile_is_read_only_if_no_dtype_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names a dtype gets it, fast or not."""
    asked = []

    def load(device: torch.device) -> Profile:
        asked.append(device)
        return CROSSING

    monkeypatch.setattr(target.profile, "load", load)
    for dtype, expected in ((FP16, "LOW"), (BF16, "LOW"), ("auto", "FULL")):
        torch._dynamo.reset()
        model = mpcompile.mpcompile(nn.Linear(16, 16), dtype=dtype, emit="eager")
        model(leaf(16, 16))
        (found,) = mpcompile.compiled_plans(model)
        assert [n.precision for n in found.nodes if n.op == "aten::linear"] == [expected]
    assert len(asked) == 1
