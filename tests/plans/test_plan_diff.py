"""What differs between two plans: the plans as wholes, their nodes, their totals."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from plans import cast, graph, large, lines_run, node, plan
from small_calls import Calls, X, in_two_graphs, net

from mpcompile import MPCompileError, Policy, plan_for
from mpcompile.planner.partitioned import Saved
from mpcompile.plans import Plan, PlanNode
from mpcompile.plans.diff import PlanDiff

REWRITTEN, SCALED = "rewritten, gradients not scaled", "rewritten, gradients scaled"


def names(diff: PlanDiff) -> list[tuple[str | None, str | None]]:
    """The pairs of nodes that the diff has, by name."""
    return [(one.first and one.first.name, one.second and one.second.name) for one in diff.nodes]


def diff_of(first: list[PlanNode], second: list[PlanNode]) -> PlanDiff:
    return plan(graph(*first)).diff(plan(graph(*second)))


def test_equal_plans() -> None:
    """Times and reasons may differ."""
    first, second = (plan_for(net(), X, device="t4") for _ in range(2))
    diff = first.diff(second)
    assert not diff
    assert str(diff) == "the plans are equal"
    assert diff.totals["casts"] == (str(first.casts),) * 2
    assert not plan(graph(node("a"))).diff(plan(graph(node("a", reason="x"), seconds={"plan": 1})))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"level": "O2"}, {"level": ("O1", "O2")}),
        ({"dtype": "bfloat16"}, {"dtype": ("float16", "bfloat16")}),
        ({"device": "cuda:0"}, {"device": ("cpu", "cuda:0")}),
        ({"model": "Other"}, {"model": ("Net", "Other")}),
        ({"versions": {"torch": "2.14"}}, {"torch": ("-", "2.14")}),
        ({"repairs": ("a", "b")}, {"repairs": ("", "a; b")}),
        ({"graphs": (graph(left="no"),)}, {"graph 0": (REWRITTEN, "left in FP32: no")}),
        ({"graphs": (graph(scaled=True),)}, {"graph 0": (REWRITTEN, SCALED)}),
        ({"graphs": ()}, {"graph 0": (REWRITTEN, "-")}),
    ],
)  # fmt: skip
def test_what_holds_for_the_whole(facts: dict[str, Any], expected: dict[str, Any]) -> None:
    first = plan(graph())
    diff = first.diff(dataclasses.replace(first, **facts))
    assert diff
    assert diff.facts == expected
    for name, (a, b) in expected.items():
        line = next(line for line in str(diff).splitlines() if line.startswith(name))
        assert all(part in line for part in (a, b))


@pytest.mark.parametrize(
    "change", [{"precision": "FULL"}, {"rule": "policy"}, {"planned": "f32[8, 4]"}]
)
def test_a_node_that_differs(change: dict[str, str]) -> None:
    diff = diff_of([node("a"), node("b")], [node("a"), node("b", **change)])
    assert names(diff) == [("b", "b")]
    assert diff.changed == diff.nodes
    (value,) = change.values()
    row = next(line for line in str(diff).splitlines() if line.startswith("0 "))
    assert "LOW f16[8, 4] [table]" in row
    assert value in row


def after(number: int) -> list[PlanNode]:
    """A pad, and the cast of what was padded, after a layer of this number."""
    name = f"linear_{number}"
    chain = cast(f"{name}_cut", name, rule="pad"), cast(f"{name}_f32", f"{name}_cut")
    return [node(name, module="last"), *chain]


# The nodes of two plans, and the pairs that differ, by name.
MATCHED: dict[str, tuple[list[PlanNode], list[PlanNode], list[tuple[str | None, str | None]]]] = {
    "of the first alone": ([node("a"), node("b", module="other")], [node("a")], [("b", None)]),
    "of the second alone": ([node("a")], [node("a"), node("b")], [(None, "b")]),
    "a renamed module": (
        [node("a", module="old"), node("b", module="old")],
        [node("a", module="new"), node("b", module="new", precision="FULL")],
        [("b", "b")],
    ),
    "another operator": ([node("a")], [node("a", op="aten::mm")], [("a", None), (None, "a")]),
    # A cast is known by what it reads: in another dtype it has another name, and stands elsewhere.
    "casts": (
        [cast("x_f16", "x"), cast("y_f16", "y"), cast("z_f16", "z")],
        [cast(f"{x}_bf16", x, planned="bf16[8, 4]") for x in "yx"],
        [("x_f16", "x_bf16"), ("y_f16", "y_bf16"), ("z_f16", None)],
    ),
    "casts of values whose names shifted": (
        after(1), [node("linear_1", module="new"), *after(2)], [(None, "linear_1")]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MATCHED)
def test_how_nodes_are_matched(case: str) -> None:
    first, second, expected = MATCHED[case]
    diff = diff_of(first, second)
    assert names(diff) == expected
    assert diff.alone == tuple(one for one in diff.nodes if None in (one.first, one.second))


def test_names_that_shifted() -> None:
    """A layer more in front: `linear_1` is another one then, and every name after it moves."""
    first = [node(f"linear_{i}", module=f"layers.{i}") for i in range(5)]
    second = [node("linear_0", module="new", rule="policy")]
    second += [node(f"linear_{i + 1}", module=f"layers.{i}") for i in range(5)]
    assert names(diff_of(first, second)) == [(None, "linear_0")]
    second[3] = dataclasses.replace(second[3], precision="FULL")
    assert names(diff_of(first, second)) == [("linear_2", "linear_3"), (None, "linear_0")]
    assert "linear_2 / linear_3" in str(diff_of(first, second))


def test_graphs_are_matched_by_number() -> None:
    model = Calls(in_two_graphs)
    full = plan_for(model, X, device="t4", policy=Policy(nodes={"linear_1": "fp32"}))
    diff = plan_for(model, X, device="t4").diff(full)
    assert {one.graph for one in diff.nodes} == {1}
    assert names(diff)[0][0] == "linear_1"


def test_totals_stand_side_by_side() -> None:
    def saving(dtype: torch.dtype) -> Plan:
        saved = (Saved("mm", "fc", (2,), dtype, 2 * dtype.itemsize, False),)
        return plan(graph(node("a"), casts=1, saved=saved))

    diff = saving(torch.float32).diff(saving(torch.float16))
    assert diff
    assert not diff.facts
    assert diff.totals["saved bytes"] == ("8", "4")
    assert diff.totals["saved bytes in f32"] == ("8", "-")
    assert diff.totals["saved bytes in f16"] == ("-", "4")
    assert "saved bytes                    8" in str(diff)


def test_as_data() -> None:
    diff = diff_of([node("a")], [node("a", precision="FULL")])
    data = json.loads(json.dumps(diff.to_dict()))
    assert data["nodes"][0]["second"]["precision"] == "FULL"
    assert data["totals"]["operators LOW"] == ["1", "0"]


def test_only_a_plan_can_be_compared() -> None:
    with pytest.raises(MPCompileError, match="not with a GraphPlan"):
        plan().diff(graph())  # type: ignore[arg-type]


@pytest.mark.parametrize("nowhere", [False, True])
def test_twice_the_plan_is_twice_the_work(nowhere: bool) -> None:
    """Also if no name is the same, and if no module is known."""

    def work(count: int) -> int:
        first = large(count)
        other = [dataclasses.replace(n, name=f"other_{n.name}") for n in first.nodes]
        if nowhere:
            other = [dataclasses.replace(n, module="") for n in other]
        return lines_run(lambda: first.diff(plan(graph(*other))))

    assert work(2000) < 2.2 * work(1000)
