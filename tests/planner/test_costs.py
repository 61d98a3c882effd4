"""costs: the planner's objective has the values it says, calculated by hand; and what the times of
a device profile make of products.
"""

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, leaf
from graphs import Stage
from module_of import module_of
from planned_programs import (
    BANDWIDTH,
    BF16,
    CROSSING,
    FP16,
    LAUNCH,
    both,
    profile_of,
    staged,
)  # fmt: skip
from torch import nn

import mpcompile
from mpcompile import ir
from mpcompile.padding.products import product
from mpcompile.planner import target
from mpcompile.planner.objective import UNIT, Objective
from mpcompile.planner.times import _written_out
from mpcompile.profile import Profile, store
from mpcompile.rules.policy import Precision


def two() -> nn.Sequential:
    """Products one after the other: (8, 16) @ (16, 16), then (8, 16) @ (16, 4)."""
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False))


TWO = profile_of(
    *both("gemm", (1, 8, 16, 16), low=30e-6, full=12e-6),
    *both("gemm", (1, 8, 4, 16), low=15e-6, full=9e-6),
)


def objective_of(program: Any, *inputs: torch.Tensor, **options: Any) -> tuple[Stage, Objective]:
    stage = staged(program, *inputs, **options)
    return stage, Objective(stage.gm.graph, stage.config)


def test_a_frozen_weight_has_no_gradient_to_cast() -> None:
    model = two()
    model[0].weight.requires_grad_(False)
    stage, objective = objective_of(model, leaf(8, 16), level="O1", low=BF16, profile=TWO)
    weights = objective.terms[stage.node("linear")].low["weights"]
    assert weights == 6 * 16 * 16 * UNIT + objective.launch


def test_a_working_copy_costs_no_cast() -> None:
    stage = staged(two(), leaf(8, 16), level="O2", low=BF16, profile=TWO)
    inputs = stage.gm.graph.find_nodes(op="placeholder")
    weight = next(i for i, n in enumerate(inputs) if ir.shape(n) == (16, 16))
    stage.config = replace(stage.config, copied={weight: None})
    objective = Objective(stage.gm.graph, stage.config)
    assert objective.terms[stage.node("linear")].low["weights"] == 0
    assert objective.terms[stage.node("linear_1")].low["weights"] > 0


def test_without_a_backward_only_the_forward_counts() -> None:
    model = two().requires_grad_(False)
    stage, objective = objective_of(model, torch.randn(8, 16), level="O1", low=BF16, profile=TWO)
    terms = objective.terms[stage.node("linear")]
    assert terms.low["time"] == pytest.approx(10e3 * UNIT, rel=1e-6)
    assert terms.full["time"] == pytest.approx(4e3 * UNIT, rel=1e-6)


def read_elsewhere(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`sigmoid` is read by `exp` in its own kernel and, after a product, by `add`."""
    h = torch.sigmoid(F.linear(x, w))
    return h.exp().sum() + (F.linear(h, w) + h).sum()


@LEVELS
def test_terms_of_stored_values(level: str) -> None:
    """Written once, read once after the product; kept for the backward at O2 alone."""
    stage, objective = objective_of(read_elsewhere, leaf(8, 8), leaf(8, 8), level=level)
    again = 2 * UNIT * 64  # two bytes of 64 elements
    # The product reads a low copy anyway. O2 counts sigmoid's own backward, too: exp keeps its
    # own result, add nothing.
    times = {"O1": 1 + 1, "O2": 1 + 1 + 1}[level]
    assert objective.terms[stage.node("sigmoid")].full["stored"] == times * again


def test_a_profile_changes_no_number_of_stored_bytes() -> None:
    stage, plain = objective_of(read_elsewhere, leaf(8, 8), leaf(8, 8), level="O2", low=BF16)
    known = Objective(stage.gm.graph, replace(stage.config, profile=profile_of()))
    assert known.constraints.open == plain.constraints.open  # it has no sample of a matrix product
    assert known.terms == plain.terms


def test_the_plan_keeps_what_was_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In sixteenths of a byte; nothing where there was nothing to decide."""
    monkeypatch.setattr(target.profile, "load", lambda device: TWO)
    model = mpcompile.mpcompile(two(), emit="eager")  # BF16, on a CPU
    model(leaf(8, 16))
    (found,) = mpcompile.compiled_plans(model)
    (cut,) = found.to_dict()["cuts"]
    assert cut["items"] == ("linear", "linear_1")
    low, full = cut["low"][0], cut["full"][0]
    assert low.keys() == {"time", "doubt", "weights", "cast"}
    assert low["time"] == pytest.approx(30_000 * UNIT, rel=1e-3)
    # A cast to BF16 reads 4 bytes and writes 2, its gradient's is written in FP32 from BF16 (4:
    # what the FP32 product would have written is not counted); a launch is as long as 1000 bytes.
    assert low["weights"] == ((6 + 4) * 16 * 16 + 1000) * UNIT
    assert cut["low"][1]["weights"] == ((6 + 4) * 4 * 16 + 1000) * UNIT
    assert full["time"] == pytest.approx(12_000 * UNIT, rel=1e-3)
    # No fusion reaches between the input and a product, or between two products.
    between = (6 * 8 * 16 + 1000) * UNIT
    assert low["cast"] == between
    assert cut["pairs"] == ((0, 1, between, between),)


# -- times -----------------------------------------------------------------------------------------


@LEVELS
def test_a_small_product_is_fp32_where_that_is_faster(level: str) -> None:
    def forward(
        m: nn.Module, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return m.large(x).exp(), m.small(y).exp()

    net = module_of(forward, large=nn.Linear(256, 256), small=nn.Linear(16, 16))
    inputs = leaf(256, 256), leaf(16, 16)
    stage = staged(net, *inputs, level=level, low=BF16, profile=CROSSING)
    stage.run()
    large, small = stage.mark("linear"), stage.mark("linear_1")
    assert (large.precision, large.rule) == (Precision.LOW, "table")
    assert (small.precision, small.rule) == (Precision.FULL, "plan")
    verdict = small.reason.partition("; but ")[2]
    assert verdict.startswith("FP32 is faster: estimated 0.01 ms, low 0.04 ms")
    assert verdict.endswith("(device profile)")


def test_a_small_model_is_told_what_low_would_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of the sum, the verdict first; of a larger batch low pays. A data sheet alone
    takes no product out of the low dtype.
    """
    monkeypatch.setenv("MPCOMPILE_PROFILE", "")  # the built-in one
    measured = replace(store.builtin("cuda-hopper"), origin="measured")

    def planned(batch: int) -> tuple[str, str]:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        plan = mpcompile.explain(model, torch.randn(batch, 64), device="h100")
        first = next(node for node in plan.nodes if node.op == "aten::linear")
        return first.precision, first.reason

    assert planned(32)[0] == "LOW"
    monkeypatch.setattr(store, "builtin", lambda stem: measured)
    precision, reason = planned(32)
    assert precision == "FULL"
    found = re.search(
        r"; but FP32 costs less: estimated ([\d.]+) ms, low ([\d.]+) ms and ([\d.]+) ms for the "
        r"casts it needs \(device profile\)$",
        reason,
    )
    full, low, casts = map(float, found.groups())
    assert low < full < low + casts
    assert planned(32 * 1024)[0] == "LOW"


@LEVELS
def test_a_small_product_between_large_ones_is_low(level: str) -> None:
    """To cast in front of it and after it would cost more than it saves."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m.outer(m.inner(m.outer(x))).exp()

    sandwich = module_of(forward, outer=nn.Linear(256, 256), inner=nn.Linear(256, 256))
    dims = (1, 256, 256, 256)
    even = profile_of(*both("gemm", dims, low=500e-6, full=499e-6))
    stage = staged(sandwich, leaf(256, 256), level=level, low=BF16, profile=even)
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


def test_written_out_attention_takes_the_time_of_its_scores_too() -> None:
    """Two products, which are measured, and what is between them, which isn't."""
    heads, length, head = 8, 32, 16
    seconds = {(heads, length, length, head): 30e-6, (heads, length, head, length): 20e-6}
    pairs = (both("gemm", dims, low, low) for dims, low in seconds.items())
    profile = profile_of(*itertools.chain(*pairs))
    query, key, value = (leaf(2, 4, length, head) for _ in range(3))
    stage = staged(F.scaled_dot_product_attention, query, key, value, low=BF16, profile=profile)
    found = product(stage.node("scaled_dot_product_attention"))
    assert found is not None
    traffic = 2 * 10 * heads * length**2  # bytes of BF16: four times forward, six times backward
    expected = sum(seconds.values()) + traffic / BANDWIDTH + 4 * LAUNCH
    assert _written_out(profile, found, BF16, backward=True) == pytest.approx(expected)
