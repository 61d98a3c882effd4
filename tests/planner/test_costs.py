"""costs: the planner's objective has the values it says, calculated by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, leaf
from planned_programs import BF16, both, profile_of, staged
from torch import nn

import mpcompile
from mpcompile import ir
from mpcompile.planner import target
from mpcompile.planner.objective import UNIT, Objective


class Two(nn.Module):
    """Products one after the other: (8, 16) @ (16, 16), then (8, 16) @ (16, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


TWO = profile_of(
    *both("gemm", (1, 8, 16, 16), low=30e-6, full=12e-6),
    *both("gemm", (1, 8, 4, 16), low=15e-6, full=9e-6),
)


def test_terms_of_products() -> None:
    stage = staged(Two(), leaf(8, 16), level="O1", low=BF16, profile=TWO)
    objective = Objective(stage.gm.graph, stage.config)
    launch = 1000 * UNIT  # bytes that memory moves in a microsecond
    assert objective.launch == launch
    first, second = (stage.node(name) for name in ("linear", "linear_1"))
    assert objective.constraints.open == [first, second]
    low, full = objective.terms[first].low, objective.terms[first].full
    # Seconds times bytes a second; a cast to BF16 reads 4 bytes and writes 2, its gradient's is
    # written in FP32 from BF16 (4: what the FP32 product would have written is not counted).
    assert low["time"] == pytest.approx(30e3 * UNIT, rel=1e-6)
    assert full["time"] == pytest.approx(12e3 * UNIT, rel=1e-6)
    assert low["weights"] == (6 + 4) * 16 * 16 * UNIT + launch
    assert objective.terms[second].low["weights"] == (6 + 4) * 4 * 16 * UNIT + launch
    # No fusion reaches between the input and a product, or between two products.
    between = 6 * 8 * 16 * UNIT + launch
    assert objective.pairs[first, second] == (between, between)
    assert objective.pairs[stage.node("x"), first] == (between, between)


def test_a_frozen_weight_has_no_gradient_to_cast() -> None:
    model = Two()
    model.first.weight.requires_grad_(False)
    stage = staged(model, leaf(8, 16), level="O1", low=BF16, profile=TWO)
    objective = Objective(stage.gm.graph, stage.config)
    weights = objective.terms[stage.node("linear")].low["weights"]
    assert weights == 6 * 16 * 16 * UNIT + objective.launch


def test_a_working_copy_costs_no_cast() -> None:
    stage = staged(Two(), leaf(8, 16), level="O2", low=BF16, profile=TWO)
    inputs = stage.gm.graph.find_nodes(op="placeholder")
    weight = next(i for i, n in enumerate(inputs) if ir.shape(n) == (16, 16))
    stage.config = replace(stage.config, copied={weight: None})
    objective = Objective(stage.gm.graph, stage.config)
    assert objective.terms[stage.node("linear")].low["weights"] == 0
    assert objective.terms[stage.node("linear_1")].low["weights"] > 0


def test_without_a_backward_only_the_forward_counts() -> None:
    model = Two().requires_grad_(False)
    stage = staged(model, torch.randn(8, 16), level="O1", low=BF16, profile=TWO)
    objective = Objective(stage.gm.graph, stage.config)
    terms = objective.terms[stage.node("linear")]
    assert terms.low["time"] == pytest.approx(10e3 * UNIT, rel=1e-6)
    assert terms.full["time"] == pytest.approx(4e3 * UNIT, rel=1e-6)


def read_elsewhere(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`sigmoid` is read by `exp` in its own kernel and, behind a product, by `add`."""
    h = torch.sigmoid(F.linear(x, w))
    return h.exp().sum() + (F.linear(h, w) + h).sum()


@LEVELS
def test_terms_of_stored_values(level: str) -> None:
    """Written once, read once behind the product; kept for the backward at O2 alone."""
    stage = staged(read_elsewhere, leaf(8, 8), leaf(8, 8), level=level)
    objective = Objective(stage.gm.graph, stage.config)
    again = 2 * UNIT * 64  # two bytes of 64 elements
    # The product reads a low copy anyway. O2 counts sigmoid's own backward, too: exp keeps its
    # own result, add nothing.
    times = {"O1": 1 + 1, "O2": 1 + 1 + 1}[level]
    assert objective.terms[stage.node("sigmoid")].full["stored"] == times * again


def test_a_profile_changes_no_number_of_stored_bytes() -> None:
    stage = staged(read_elsewhere, leaf(8, 8), leaf(8, 8), level="O2", low=BF16)
    plain = Objective(stage.gm.graph, stage.config)
    known = Objective(stage.gm.graph, replace(stage.config, profile=profile_of()))
    assert known.constraints.open == plain.constraints.open  # it has no sample of a matrix product
    assert known.terms == plain.terms


def test_the_plan_lists_what_was_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes; nothing where there was nothing to decide."""
    monkeypatch.setattr(target.profile, "load", lambda device: TWO)
    model = mpcompile.mpcompile(Two(), emit="eager")  # BF16, on a CPU
    model(leaf(8, 16))
    (found,) = mpcompile.compiled_plans(model)
    by_name = {node["name"]: node for node in found.to_dict()["nodes"]}
    costs = by_name["linear"]["costs"]
    assert costs["low"].keys() == {"time", "doubt", "weights"}
    assert costs["full"].keys() >= {"time"}
    assert costs["low"]["time"] == pytest.approx(30_000, rel=1e-3)
    assert costs["low"]["weights"] == 10 * 16 * 16 + 1000
    assert all(node["costs"] is None for node in by_name.values() if node["rule"] == "cast")
