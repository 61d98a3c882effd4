"""The page of a plan as text: what it says; and of a plan and of a report, what the pages can't be
made to do.
"""

import dataclasses
from pathlib import Path
from typing import Any

import page_plans
import pytest
import torch
from page_parser import Page, assert_loads_nothing, unharmed
from plans import node as linear
from reports import faulty
from repository import PACKAGE
from torch import nn

from mpcompile import MPCompileError, explain, plan_for
from mpcompile.diagnosis import report as reported
from mpcompile.planner.graph_plan import GraphPlan
from mpcompile.planner.partitioned import BackwardNode, Saved
from mpcompile.planner.plan_data import Line, ModuleLine, PlanNode
from mpcompile.planner.plan_text import verdict
from mpcompile.planner.tensor_core_report import TensorCoreOp, TensorCoreReport
from mpcompile.plans.model_plan import Plan
from mpcompile.plans.page.render import aligned, charts_of, render

MEGABYTE = 1_000_000


def node(name: str, **fields: Any) -> PlanNode:
    given = {"op": "aten::exp", "module": "", "captured": "f32[2]", "planned": "f32[2]"}
    return linear(name, **{**given, "precision": "FULL", **fields})


def data_in(plan: Plan) -> Any:
    return Page(render(plan)).data


def plan_with(*nodes: PlanNode, **fields: Any) -> Plan:
    modules = fields.pop("modules", ())
    graph = GraphPlan("O1", "float16", "cuda:0", nodes, **fields)
    return Plan("Net", "O1", "float16", "cuda:0", (graph,), modules, {"torch": "2.13.0"})


def product(name: str, flops: int, before: bool, after: bool) -> TensorCoreOp:
    return TensorCoreOp(name, "aten::mm", "", "gemm", {"m": 3}, {"m": 8}, flops, before, after, "")


# -- what it says ----------------------------------------------------------------------------------


def test_the_page_holds_the_plan() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    plan = plan_for(net, torch.ones(3, 4), device="t4", level="O2")
    page = Page(render(plan))
    assert {"Sequential", "O2", "float16", "Tesla T4", torch.__version__} <= set(page.texts)
    (graph,) = page.data["graphs"]
    assert [n["name"] for n in graph["nodes"]] == [n.name for n in plan.nodes]
    (linear,) = (n for n in graph["nodes"] if n["name"] == "linear")
    (of_plan,) = (n for n in plan.nodes if n.name == "linear")
    assert (linear["reason"], linear["module"]) == (of_plan.reason, "0")
    assert linear["product"]["before"] == {"batch": 1, "m": 3, "n": 4, "k": 4}
    assert "linear" in linear["change"]
    ((text, operands),) = (rest for name, *rest in graph["after"] if name == "linear")
    assert len(operands) == 3
    assert text.endswith(f"linear({', '.join(operands)})")


def test_what_holds_for_the_model_stands_on_top() -> None:
    left = GraphPlan("O0", "float32", "cuda:0", left="a kernel is unknown")
    graph = GraphPlan("O1", "float16", "cuda:0", ends_with="print was called")
    plan = Plan("Net", "O1", "float16", "cuda:0", (graph, left), repairs=("exp was pinned",))
    texts = Page(render(plan)).texts
    for title, line in (
        ("Graphs left in FP32", "a kernel is unknown"),
        ("Graph breaks", "print was called"),
        ("Repairs", "exp was pinned"),
    ):
        assert texts.index(title) < texts.index(line)
    assert "Sizes worth changing" not in texts


def test_charts() -> None:
    """By hand: 1 of 4 FLOPs was eligible, 3 of 4 are; 10 FP16 and 30 FP32 bytes are kept."""
    ops = (product("a", 1, True, True), product("b", 2, False, True), product("c", 1, False, False))
    saved = (
        Saved("mm", "", (5,), torch.float16, 10, False),
        Saved("exp", "", (5,), torch.float32, 20, False),
        Saved("exp", "", (5,), torch.float32, 10, True),
    )
    plan = plan_with(
        node("a", precision="LOW"), node("b"), node("c"),
        node("a_f16", rule="cast", precision="KEEP"), tensor_cores=TensorCoreReport(ops),
        saved=saved, casts=1,
    )  # fmt: skip
    nodes, flops, kept = charts_of(plan)
    assert [chart.total for chart in (nodes, flops, kept)] == ["3", "4 FLOP", "40 B"]
    assert kept.note == "10 B of it copies of weights and inputs"
    amounts = [[(p.precision, p.amount) for p in bar] for bar in flops.bars.values()]
    assert amounts == [[("LOW", 0.25), ("FULL", 0.75)], [("LOW", 0.75), ("FULL", 0.25)]]
    assert [(p.label, p.amount) for p in nodes.bars[""]] == [("LOW, FP16", 1), ("FULL, FP32", 2)]
    assert [(p.label, p.amount) for p in kept.bars[""]] == [("f32", 30), ("f16", 10)]
    page = Page(render(plan))
    xs, widths = (
        [value for tag, key, value in page.attributes if (tag, key) == ("rect", name)]
        for name in ("x", "width")
    )
    shares = [(33.333, 66.667), (25, 75), (75, 25), (75, 25)]
    assert widths == [f"{share:.3f}" for pair in shares for share in pair]
    assert xs == [f"{x:.3f}" for first, _ in shares for x in (0, first)]


def test_counters_are_no_operators_by_precision() -> None:
    """`add_` on the batches that a batch norm has seen; an integer that is computed is one."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    plan = explain(model, torch.ones(3, 4), dtype="bf16")
    assert next(n.op for n in plan.nodes if not n.is_added) == "aten::add_"
    assert next(charts_of(plan)).total == "2"
    (graph,) = data_in(plan)["graphs"]
    assert [n["op"] for n in graph["nodes"] if n["counter"]] == ["aten::add_"]
    assert [m["counts"].get("KEEP", 0) for m in data_in(plan)["modules"]] == [0, 0, 0]
    computed = plan_with(node("sum", op="aten::sum", planned="i64[]", precision="KEEP"))
    assert next(charts_of(computed)).total == "1"


@pytest.mark.slow("plans of several models")
def test_the_verdict_stands_on_top() -> None:
    """That of `print(plan)`, sentence by sentence."""
    plan = page_plans.resnet_plan()
    texts = Page(render(plan)).texts
    lines = [line.strip() for line in verdict(plan.title, plan.graphs)]
    places = [texts.index(line) for line in lines]
    assert places == sorted(places)
    assert places[0] < texts.index("Operators by precision:")


def test_large_numbers_have_a_prefix() -> None:
    saved = (Saved("mm", "", (5,), torch.float16, 2_500_000, False),)
    report = TensorCoreReport((product("a", 7_110_000_000_000, True, True),))
    totals = [chart.total for chart in charts_of(plan_with(tensor_cores=report, saved=saved))]
    assert totals == ["0", "7.11 TFLOP", "2.50 MB"]


def test_a_device_without_tensor_cores_has_none_on_its_page() -> None:
    report = TensorCoreReport((product("a", 1, True, True),))
    plan = dataclasses.replace(plan_with(node("a"), tensor_cores=report), device="cpu")
    assert [chart.title for chart in charts_of(plan)] == ["Operators by precision"]
    assert data_in(plan)["units"] is False


def test_a_plan_of_nothing_has_a_page() -> None:
    page = Page(render(Plan("Net", "O1", "float16", "cpu", ())))
    assert page.data["graphs"] == []
    assert "Net at O1: no matrix product" in page.texts


def test_modules_count_what_is_below_them() -> None:
    modules = tuple(ModuleLine(*m) for m in (("", "Net"), ("b", "List"), ("b.0", "Block")))
    plan = plan_with(
        node("one", module="b.0"),
        node("two", module="b.0.made", precision="LOW"),  # not among the model's modules
        node("two_f16", module="b", rule="cast", precision="KEEP"),
        node("loss"),
        modules=modules,
    )
    found = [(m["path"], m["kind"], m["parent"], m["counts"]) for m in data_in(plan)["modules"]]
    assert found == [
        ("", "Net", True, {"FULL": 2, "LOW": 1}),
        ("b", "List", True, {"FULL": 1, "LOW": 1}),
        ("b.0", "Block", True, {"FULL": 1, "LOW": 1}),
        ("b.0.made", "", False, {"LOW": 1}),
    ]


def test_a_backward_node_has_the_precision_of_its_result() -> None:
    results = {"f16[2]": "LOW", "bf16[2]": "LOW", "f32[]": "FULL", "i64[2]": "KEEP",
               "(f32[2], i64[2])": "FULL"}  # fmt: skip
    backward = tuple(BackwardNode("mm", "aten::mm", result, "exp") for result in results)
    (graph,) = data_in(plan_with(backward=backward))["graphs"]
    assert [n["precision"] for n in graph["backward"]] == list(results.values())


def test_what_a_pass_made_was_not_captured() -> None:
    """A cast, and an operator that a pass wrote in place of another one."""
    plan = plan_with(node("exp"), node("exp_f16", rule="cast"), node("mul", captured="NoneType"))
    (graph,) = data_in(plan)["graphs"]
    assert [n["captured"] for n in graph["nodes"]] == ["f32[2]", None, None]


@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [
        ("ab", "ab", [("a", "a"), ("b", "b")]),
        ("ab", "acb", [("a", "a"), ("", "c"), ("b", "b")]),
        ("axb", "ab", [("a", "a"), ("x", ""), ("b", "b")]),
        ("axb", "acb", [("a", "a"), ("x", ""), ("", "c"), ("b", "b")]),
        ("", "a", [("", "a")]),
        ("abc", "bca", [("a", ""), ("b", "b"), ("c", "c"), ("", "a")]),
    ],
)
def test_lines_are_aligned(before: str, after: str, rows: list[tuple[str, str]]) -> None:
    sides = tuple(Line(n, f"{n} = x") for n in before), tuple(Line(n, f"{n} = y") for n in after)
    found = [
        tuple("" if at is None else side[at].name for side, at in zip(sides, row, strict=True))
        for row in aligned(*sides)
    ]
    assert found == rows


# -- what it can't be made to do -------------------------------------------------------------------


@pytest.mark.parametrize("of", ["a plan", "a report"])
def test_no_name_becomes_markup(of: str) -> None:
    evil = page_plans.EVIL
    is_plan = of == "a plan"
    html = render(page_plans.evil_plan()) if is_plan else reported.render(faulty(evil))
    page = unharmed(html, evil)
    first, *_, last = page.data["graphs"][0]["nodes"]
    assert (first["reason"] if is_plan else last["module"].removeprefix("blocks.2.down")) == evil
    assert not is_plan or evil in [module["path"] for module in page.data["modules"]]


@pytest.mark.parametrize("html", [render(plan_with(node("exp"))), reported.render(faulty())])
def test_the_page_may_load_nothing(html: str) -> None:
    assert_loads_nothing(html)


@pytest.mark.parametrize(
    ("shown", "made_of"), [(plan_with(node("exp")), render), (faulty(), reported.render)]
)
def test_a_path_that_cannot_be_written(shown: Any, made_of: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path / "file" / "page", "File exists"), (tmp_path, "Is a directory")):
        for write in (shown.to_html, shown.save):
            with pytest.raises(MPCompileError, match=f"can't be written: {why}; give the path"):
                write(path)
    page = tmp_path / "new" / "folder" / "page.html"
    shown.to_html(str(page))
    assert page.read_text(encoding="utf-8") == made_of(shown)


# -- size ------------------------------------------------------------------------------------------


def test_the_same_plan_gives_the_same_page() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.ones(3, 4)
    first = plan_for(net, x, device="t4")
    assert render(first) == render(plan_for(net, x, device="t4"))
    other = plan_for(net, x, device="t4", level="O3")
    assert render(first) != render(other)


@pytest.mark.slow("plans of several models")
def test_pages_are_small() -> None:
    """Of a ResNet, and of 24 layers: the nodes of four, six times over, in graphs of their own."""
    gpt = page_plans.gpt_plan()
    for plan in (page_plans.resnet_plan(), dataclasses.replace(gpt, graphs=gpt.graphs * 6)):
        assert len(plan.nodes) > 100
        assert len(render(plan).encode()) < 3 * MEGABYTE


def test_styles_and_scripts_are_short() -> None:
    files = [p for p in (PACKAGE / "plans" / "page").iterdir() if p.suffix in (".css", ".js")]
    assert len(files) > 1
    assert {p.name for p in files if p.read_text().count("\n") > 400} == set()
