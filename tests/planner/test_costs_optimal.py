"""costs: the plan is the cheapest there is, keeps what is pinned, and is the same each time."""

import itertools
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, leaf
from graphs import Stage
from planned_programs import BF16, CROSSING, PROGRAMS, SMALL, both, profile_of, staged
from torch import fx, nn

from mpcompile import ir
from mpcompile.planner.constraints import Item, Rounded
from mpcompile.planner.objective import Objective
from mpcompile.profile import Profile
from mpcompile.rules.policy import Config, Level, Policy, Precision


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
