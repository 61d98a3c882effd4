"""The plan is the cheapest there is, of which there is one, and keeps what is pinned; and the
minimum cut beneath it, against every labelling there is.
"""

import itertools
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, leaf
from graphs import Stage
from hypothesis import given, settings
from hypothesis import strategies as st
from module_of import module_of
from planned_programs import BF16, CROSSING, PROGRAMS, SMALL, both, profile_of, staged
from torch import fx, nn

from mpcompile import ir
from mpcompile.planner.constraints import Item, Rounded
from mpcompile.planner.min_cut import NEVER, MinimumCut
from mpcompile.planner.objective import Objective
from mpcompile.profile import Profile
from mpcompile.rules.policy import Config, Level, Policy, Precision

# -- plans -----------------------------------------------------------------------------------------

Labels = tuple[bool, ...]


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
        return bool(ir.is_stored_low(item.node))
    return ir.precision(item) is Precision.LOW


def each_assignment(graph: fx.Graph, config: Config) -> tuple[list[Item], dict[Labels, int]]:
    """The items to decide, and what each way to label them costs."""
    objective = Objective(graph, config)
    known = {n: ir.precision(n) is Precision.LOW for n in graph.nodes if n not in objective.terms}
    items = objective.constraints.open
    assert len(items) <= 12, f"{len(items)} items: too many to try each assignment"
    return items, {
        labels: total(objective, {**known, **dict(zip(items, labels, strict=True))})
        for labels in itertools.product((False, True), repeat=len(items))
    }


def cheapest(graph: fx.Graph, config: Config) -> dict[Item, bool]:
    """Of the assignments that cost least, the one with the fewest LOW."""
    items, costs = each_assignment(graph, config)
    best = [labels for labels, cost in costs.items() if cost == min(costs.values())]
    return dict(zip(items, min(best, key=sum), strict=True))


def wanted_in_full(best: Mapping[Item, bool]) -> list[fx.Node]:
    """Products that a rule made LOW and that are FULL here."""
    nodes = [item for item, low in best.items() if isinstance(item, fx.Node) and not low]
    return [node for node in nodes if ir.precision(node) is Precision.LOW]


def is_optimal(stage: Stage) -> int:
    """Run the pass and compare with every assignment; how many items it had to decide.

    At O2 products that are FP32 are settled first, and all assignments are tried again.
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
    items, costs = each_assignment(graph, stage.config)
    cut = ir.min_cut(getattr(items[0], "node", items[0])) if items else MinimumCut((), (), (), ())
    for i, one in enumerate(cut.weighed(cut.items)):  # what a plan says of each
        other = min(cost for labels, cost in costs.items() if labels[i] is not one.low)
        assert one.totals == (min(costs.values()), other)
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

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(F.gelu(m.first(x)) + 1e-40)
        return m.second(torch.tanh(h)).exp().sum()

    program = module_of(forward, first=nn.Linear(16, 16), second=nn.Linear(16, 16))
    policy = Policy(full=["gelu"], low=["tanh"], modules={"second": "fp32"})
    stage = staged(program, leaf(8, 16), level=level, low=BF16, policy=policy, profile=CROSSING)
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


# -- cuts ------------------------------------------------------------------------------------------


Pairs = dict[tuple[int, int], tuple[int, int]]
Problem = tuple[list[int], list[int], Pairs]


def cut_of(low: list[int], full: list[int], pairs: Pairs) -> MinimumCut:
    low_terms, full_terms = (tuple({"own": cost} for cost in side) for side in (low, full))
    names = tuple(map(str, range(len(low))))
    return MinimumCut(names, low_terms, full_terms, tuple((*e, *c) for e, c in pairs.items()))


def each_cost(low: list[int], full: list[int], pairs: Pairs) -> dict[Labels, int]:
    costs: dict[Labels, int] = {}
    for labels in itertools.product((False, True), repeat=len(low)):
        own = sum(a if is_low else b for is_low, a, b in zip(labels, low, full, strict=True))
        differ = (((a, b), cost) for (a, b), cost in pairs.items() if labels[a] != labels[b])
        costs[labels] = own + sum(cost[0] if labels[a] else cost[1] for (a, _), cost in differ)
    return costs


# Few values, so that ties are common; 0 and NEVER among them.
COSTS = st.sampled_from([0, 0, 1, 2, 3, 7, 50, NEVER])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count = draw(st.integers(0, 9))
    low, full = (draw(st.lists(COSTS, min_size=count, max_size=count)) for _ in range(2))
    edges = [(a, b) for a in range(count) for b in range(count) if a != b]
    chain = list(itertools.pairwise(range(count)))
    chosen = chain if draw(st.booleans()) else []
    if edges:
        chosen = chosen + draw(st.lists(st.sampled_from(edges), max_size=2 * count))
    return low, full, {edge: (draw(COSTS), draw(COSTS)) for edge in chosen}


@settings(deadline=None, max_examples=400)
@given(problems())
def test_the_total_is_the_least_and_the_low_items_are_the_fewest(problem: Problem) -> None:
    costs = each_cost(*problem)
    best = [labels for labels, cost in costs.items() if cost == min(costs.values())]
    found = tuple(cut_of(*problem).best())
    assert found in best
    assert [labels for labels in best if sum(labels) <= sum(found)] == [found]


@settings(deadline=None, max_examples=400)
@given(problems())
def test_with_the_other_label_the_rest_is_free_and_changes_no_more_than_it_must(
    problem: Problem,
) -> None:
    cut, costs = cut_of(*problem), each_cost(*problem)
    best = cut.best()
    for i, one in enumerate(cut.weighed(cut.items)):
        other = {labels: cost for labels, cost in costs.items() if labels[i] is not best[i]}
        least = min(other.values())
        assert one.totals == (min(costs.values()), least)
        assert sum(b - a for a, b in one.costs.values()) == least - one.totals[0]
        changed = {i, *map(int, one.others)}
        assert other[tuple(low is not (j in changed) for j, low in enumerate(best))] == least
        alike = (labels for labels, cost in other.items() if cost == least)
        fewest = min(sum(a is not b for a, b in zip(x, best, strict=True)) for x in alike)
        assert len(changed) == fewest


def test_a_long_chain_is_decided_from_its_ends() -> None:
    """A thousand items that nothing but their neighbours decides, with a weak spot."""
    count = 1000
    low, full = [0] * count, [0] * count
    full[0] = low[-1] = NEVER
    pairs = {(i, i + 1): (7, 7) for i in range(count - 1)}
    pairs[400, 401] = (3, 3)
    assert cut_of(low, full, pairs).best() == [True] * 401 + [False] * 599


def test_never_is_above_any_sum() -> None:
    """A terabyte, in sixteenths of a byte, in each of fifty thousand nodes."""
    assert NEVER > 16 * 10**12 * 50_000
