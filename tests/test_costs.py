"""costs: the planner's objective has the values it says, and the plan is the cheapest there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, leaf
from graphs import Stage
from torch import fx, nn

import mpcompile
from mpcompile import ir
from mpcompile.passes.graph.plan import plan
from mpcompile.planner import target
from mpcompile.planner.constraints import Item, Rounded
from mpcompile.planner.objective import UNIT, Objective
from mpcompile.profile import Profile, Sample
from mpcompile.rules.policy import Config, Level, Policy, Precision

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# -- profiles, made up -----------------------------------------------------------------------------

BANDWIDTH = 1e9  # bytes a second
LAUNCH = 1e-6  # seconds, in which memory moves a thousand bytes
COPIES = (
    Sample("copy", FP32, (8,), LAUNCH, LAUNCH),
    Sample("copy", FP32, (10**9,), 1.0, 2.0),
    Sample("copy", BF16, (10**9,), 1.0, 2.0),
)

SMALL, LARGE = (1, 16, 16, 16), (1, 256, 256, 256)


def profile_of(*samples: Sample) -> Profile:
    return Profile("a CPU", "cpu", "2.13.0", "", 2, (*COPIES, *samples))


def both(kind: str, dims: tuple[int, ...], low: float, full: float) -> tuple[Sample, ...]:
    """One size in both dtypes; forward and backward together take these seconds."""
    return (
        Sample(kind, BF16, dims, low / 3, low),
        Sample(kind, FP32, dims, full / 3, full),
    )


# FP32 is faster for small products, the low dtype for large ones.
CROSSING = profile_of(
    *both("gemm", SMALL, low=40e-6, full=10e-6),
    *both("gemm", LARGE, low=500e-6, full=2000e-6),
    *both("rnn", (4, 8, 16, 16, 4), low=90e-6, full=400e-6),
    *both("conv", (2, 4, 4, 9, 36, 1), low=30e-6, full=12e-6),
)


def staged(program: Any, *inputs: Any, profile: Profile | None = None, **options: Any) -> Stage:
    """A program in front of `plan`."""
    with torch._dynamo.config.patch(allow_rnn=True):
        stage = Stage(plan, program, *inputs, **options)
    stage.config = replace(stage.config, profile=profile)
    return stage


# -- the plan is optimal ---------------------------------------------------------------------------


def total(objective: Objective, low: Mapping[Item, bool]) -> int:
    """The cost of an assignment, added up term by term."""
    cost = 0
    for item, terms in objective.terms.items():
        cost += sum((terms.low if low[item] else terms.full).values())
    for (operand, reader), (operand_low, reader_low) in objective.pairs.items():
        a, b = (low.get(item, objective.constraints.is_low(item)) for item in (operand, reader))
        if a != b:
            cost += operand_low if a else reader_low
    return cost


def decided(item: Item) -> bool:
    if isinstance(item, Rounded):
        return ir.is_stored_low(item.node)
    return ir.precision(item) is Precision.LOW


def cheapest(graph: fx.Graph, config: Config) -> dict[Item, bool]:
    """Of the assignments that cost least, the one with the fewest LOW; each is tried."""
    objective = Objective(graph, config)
    known = {n: ir.precision(n) is Precision.LOW for n in graph.nodes if n not in objective.terms}
    items = objective.constraints.open
    assert len(items) <= 12, f"{len(items)} items: too many to try each assignment"
    costs = {
        labels: total(objective, {**known, **dict(zip(items, labels, strict=True))})
        for labels in itertools.product((False, True), repeat=len(items))
    }
    best = [labels for labels, cost in costs.items() if cost == min(costs.values())]
    return dict(zip(items, min(best, key=sum), strict=True))


def wanted_in_full(best: Mapping[Item, bool]) -> list[fx.Node]:
    """Products that a rule made LOW and that are FULL here."""
    nodes = [item for item, low in best.items() if isinstance(item, fx.Node) and not low]
    return [node for node in nodes if ir.precision(node) is Precision.LOW]


def is_optimal(stage: Stage) -> int:
    """Run the pass and compare with every assignment; how many items it had to decide.

    At O2 products that are FP32 are settled first, and all assignments are tried anew.
    """
    graph = stage.gm.graph
    before = {n: ir.mark(n) for n in graph.nodes if ir.is_marked(n)}
    open_ = Objective(graph, stage.config).constraints.open
    stage.run()
    found = {item: decided(item) for item in open_}
    after = {n: ir.mark(n) for n in before}
    for node, mark in before.items():
        ir.set_mark(node, mark)
    wanted = dict.fromkeys(open_, False)
    while slower := wanted_in_full(best := cheapest(graph, stage.config)):
        if stage.config.level is not Level.O2:
            break
        for node in slower:
            ir.remark(node, precision=Precision.FULL, by=ir.By.PLAN)
    assert found == {**wanted, **best}
    fixed = {n: mark for n, mark in before.items() if n not in found}
    for node, mark in fixed.items():  # a reason may gain words on how the result is stored
        now = after[node]
        assert (now.precision, now.by, now.low) == (mark.precision, mark.by, mark.low)
    return len(open_)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(x)) * torch.sigmoid(self.up(x))
        out: torch.Tensor = self.down(hidden)
        return out.relu().sum()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.norm(x).mean()


class Attention(nn.Module):
    """Written by hand, as two products around a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / 4
        return (scores.softmax(-1) @ self.v(x) + x).tanh()


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 16), nn.Embedding(4, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(idx) + self.places(idx % 4))
        return F.cross_entropy(self.head(F.dropout(x)), idx)


class BasicBlock(nn.Module):
    """Two convolutions with batch norm, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + x).mean((2, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(10, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.tokens(idx))
        return F.log_softmax(self.head(x), -1).mean()


def tokens(*size: int) -> torch.Tensor:
    return torch.randint(0, 10, size)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "MLP": (MLP, lambda: leaf(8, 16)),
    "residual": (Residual, lambda: leaf(8, 16)),
    "attention by hand": (Attention, lambda: leaf(2, 8, 16)),
    "embedding and norm": (Lookup, lambda: tokens(8)),
    "convolutions": (BasicBlock, lambda: leaf(2, 4, 6, 6)),
    "LSTM": (Recurrent, lambda: tokens(4, 8)),
}


@LEVELS
@pytest.mark.parametrize("profile", [None, CROSSING], ids=["no profile", "profile"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_plan_is_the_cheapest_assignment(
    name: str, profile: Profile | None, level: str
) -> None:
    module, inputs = PROGRAMS[name]
    stage = staged(module(), inputs(), level=level, low=BF16, profile=profile)
    assert is_optimal(stage) >= 2


@LEVELS
@pytest.mark.parametrize("name", ["MLP", "residual", "embedding and norm"])
def test_where_no_product_is_low_nothing_is(name: str, level: str) -> None:
    """Halving the bytes of a residual stream between products in FP32 would only round it."""
    slower = profile_of(*both("gemm", SMALL, low=40e-6, full=10e-6))
    module, inputs = PROGRAMS[name]
    stage = staged(module(), inputs(), level=level, low=BF16, profile=slower)
    stage.run()
    nodes = [n for n in stage.gm.graph.nodes if ir.is_marked(n)]
    assert not any(ir.precision(n) is Precision.LOW or ir.is_stored_low(n) for n in nodes)


@LEVELS
def test_what_is_pinned_stays_pinned(level: str) -> None:
    """By the user, by a guard, by the table; with a profile that has FP32 slower, too."""

    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.relu(F.gelu(self.first(x)) + 1e-40)
            return self.second(torch.tanh(h)).exp().sum()

    policy = Policy(full=["gelu"], low=["tanh"], modules={"second": "fp32"})
    stage = staged(Program(), leaf(8, 16), level=level, low=BF16, policy=policy, profile=CROSSING)
    is_optimal(stage)
    rules = {"gelu": "policy", "tanh": "policy", "linear_1": "policy", "add": "guard"}
    for name, rule in rules.items():
        assert stage.mark(name).rule == rule
        assert stage.mark(name).precision.value == ("LOW" if name == "tanh" else "FULL")
    assert stage.mark("exp").precision is Precision.FULL


@LEVELS
def test_a_users_low_product_is_not_reconsidered(level: str) -> None:
    layer = nn.Linear(16, 16)
    for policy, expected in ((Policy(), "FULL"), (Policy(low=["linear"]), "LOW")):
        stage = staged(layer, leaf(16, 16), level=level, low=BF16, policy=policy, profile=CROSSING)
        stage.run()
        assert stage.mark("linear").precision.value == expected


# -- the terms, by hand ----------------------------------------------------------------------------


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


# -- time ------------------------------------------------------------------------------------------


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
    assert small.reason.endswith("slower so: 0.04 ms low, 0.01 ms FP32 (device profile)")


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


def test_the_profile_is_read_for_the_dtype_that_the_device_is_fast_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU one asks for FP16 to see its numbers, never for its speed."""
    asked = []

    def load(device: torch.device) -> Profile:
        asked.append(device)
        return CROSSING

    monkeypatch.setattr(target.profile, "load", load)
    for dtype, expected in ((FP16, "LOW"), (BF16, "FULL")):
        torch._dynamo.reset()
        model = mpcompile.mpcompile(nn.Linear(16, 16), dtype=dtype, emit="eager")
        model(leaf(16, 16))
        (found,) = mpcompile.compiled_plans(model)
        assert [n.precision for n in found.nodes if n.op == "aten::linear"] == [expected]
    assert len(asked) == 1


def test_the_plan_lists_what_was_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes; nothing where there was nothing to decide."""
    monkeypatch.setattr(target.profile, "load", lambda device: TWO)
    model = mpcompile.mpcompile(Two(), dtype=BF16, emit="eager")
    model(leaf(8, 16))
    (found,) = mpcompile.compiled_plans(model)
    by_name = {node["name"]: node for node in found.to_dict()["nodes"]}
    costs = by_name["linear"]["costs"]
    assert costs["low"].keys() == {"time", "doubt", "weights"}
    assert costs["full"].keys() >= {"time"}
    assert costs["low"]["time"] == pytest.approx(30_000, rel=1e-3)
    assert costs["low"]["weights"] == 10 * 16 * 16 + 1000
    assert all(node["costs"] is None for node in by_name.values() if node["rule"] == "cast")


# -- the same program, the same plan ---------------------------------------------------------------


@LEVELS
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_program_gets_the_same_plan(name: str, level: str) -> None:
    module, inputs = PROGRAMS[name]
    seen = []
    for _ in range(2):
        torch._dynamo.reset()
        stage = staged(module(), inputs(), level=level, low=BF16, profile=CROSSING)
        stage.run()
        stored = [n.name for n in stage.gm.graph.nodes if ir.is_stored_low(n)]
        reasons = [ir.mark(n).reason for n in stage.gm.graph.nodes if ir.is_marked(n)]
        seen.append((stage.marks, stored, reasons))
    assert seen[0] == seen[1]
