"""`print(plan)`: whole lines, aligned, then the backward and the totals."""

import io
import re
from typing import Any

import pytest
import rich
from plans import cast, graph, large, lines_run, node, plan
from rich.console import Console
from small_calls import Calls, X, in_two_graphs

from mpcompile import plan_for
from mpcompile.devices.gpus import gpu
from mpcompile.planner.graph_plan import GraphPlan
from mpcompile.planner.grid import Grid
from mpcompile.planner.partitioned import BackwardNode
from mpcompile.planner.tensor_core_report import TensorCoreOp, TensorCoreReport


def products(*ops: TensorCoreOp, **facts: Any) -> GraphPlan:
    """A graph of these products, low but those whose reason says otherwise."""
    nodes = [
        node(
            op.name, module=op.module, precision="FULL" if op.reason else "LOW",
            reason=f"matrix product; but {op.reason}" if op.reason else "matrix product",
        )
        for op in ops
    ]  # fmt: skip
    return graph(*nodes, tensor_cores=TensorCoreReport(ops), **facts)


def product(module: str, flops: int = 1000, why: str = "") -> TensorCoreOp:
    sizes: dict[str, int | str] = {"batch": 1, "m": 8, "n": 4, "k": 4}
    name = module.replace(".", "_")
    return TensorCoreOp(
        name, "aten::linear", module, "gemm", sizes, sizes, flops, not why, not why, why
    )


@pytest.mark.parametrize(
    ("graphs", "said"),
    [
        ([products(product("a", 3000), product("b", 500, "slow"), product("c", 500, "odd"))],
         "Net at O1: 1 of 3 products in FP16, 75.0% of 4.0 kFLOP\n  in FP32: b: slow\n"
         "  in FP32: c: odd\n"),
        # nodes of several graphs bear the same names
        ([products(product("a")), products(product("a", 3000, "slow"))],
         "Net at O1: 1 of 2 products in FP16, 25.0% of 4.0 kFLOP\n"),
        ([graph(node("call", products=2, precision="KEEP"))],
         "Net at O1: 0 of 2 products in FP16\n  in FP32: 2 in calls"),
    ],
)  # fmt: skip
def test_it_begins_with_a_verdict(graphs: list[GraphPlan], said: str) -> None:
    assert str(plan(*graphs)).startswith(said)


def test_the_verdict_names_the_costliest_and_counts_the_rest() -> None:
    alike = [product(f"layer{i}", 100 + i, "small") for i in range(5)]
    rare = [product(f"other{i}", 10 + i, f"reason {i}") for i in range(4)]
    text = str(plan(products(*alike, *rare))).splitlines()
    assert text[1] == "  in FP32: layer4, layer3, layer2 and 2 more: small"
    assert text[4] == "  in FP32: 2 for other reasons"


def test_alike_layers_are_one_row() -> None:
    text = str(plan(products(*(product(f"blocks.{i}.fc") for i in range(12)))))
    (row,) = [line for line in text.splitlines() if "blocks." in line]
    assert row.split()[:4] == ["blocks.*.fc", "(12)", "net.py:7", "FP16"]
    assert "m 8, n 4, k 4" in row


def test_a_cpu_has_no_tensor_cores() -> None:
    one = product("a")
    assert "Tensor Core" not in str(plan(products(one)))
    assert "Tensor Core" not in plan(products(one)).full()
    assert "Tensor Cores" in str(plan(products(one), gpu=gpu("t4")))


def test_columns_are_aligned_and_whole() -> None:
    reason = "a reason as long as reasons can be, " * 12
    made = plan(graph(node("a", reason=reason), node("a_long_name_層", planned="f32[8, 4]")))
    head, first, second = made.full().splitlines()[2:5]
    assert head.split("  ")[0] == "node"
    assert re.split(r"  +", head) == [
        "node", "op", "before -> after", "runs in", "rule", "module", "source", "reason",
    ]  # fmt: skip
    assert first.endswith(reason.rstrip())
    assert first.index("linear") == head.index("op")
    assert second.index("linear") == head.index("op") - 1  # the sign is two cells wide
    assert first[head.index("before") :].startswith("f32[8, 4] -> f16[8, 4]  FP16")


def test_a_type_that_stays_stands_once() -> None:
    text = plan(graph(node("a", planned="f32[8, 4]"), cast("b", "a"))).full()
    assert "->" not in text.splitlines()[3]
    assert "->" not in text.splitlines()[4]


def test_each_graph_has_its_number() -> None:
    planned = plan_for(Calls(in_two_graphs), X, device="t4")
    assert [plan.counts() for plan in planned.graphs] == [{"LOW": 1}, {"LOW": 2}]
    numbers = re.findall(r"^O1 float16 on cuda:0, graph (\d): ", planned.full(), re.M)
    assert numbers == re.findall(r"^graph (\d)$", str(planned), re.M) == ["0", "1"]
    assert "graph 0" not in str(plan(graph(node("a"))))


def test_the_backward_follows_the_forward() -> None:
    """And it is told in full alone, as casts are."""
    backward = (
        BackwardNode("gelu_1", "aten::gelu", "f16[8, 4]", "gelu", recomputed=True),
        BackwardNode("mm_1", "aten::mm", "f16[4, 4]", "linear"),
    )
    made = plan(graph(node("linear"), cast("linear_f32", "linear"), backward=backward))
    assert not [name for name in ("mm_1", "linear_f32") if name in str(made)]
    text = made.full()
    assert "\nlinear_f32 " in text
    assert "backward: 2 operators, 1 of them compute a value of the forward again\n" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
    assert rows[1:] == [
        ["gelu_1", "gelu", "f16[8,", "4]", "gelu", "recomputed"],
        ["mm_1", "mm", "f16[4,", "4]", "linear"],
    ]
    assert text.index("\nlinear ") < text.index("\nbackward:") < text.index("Casts: ")
    assert "\nbackward:" not in plan(graph(node("linear"))).full()
    assert "\nbackward: 1 operators\n" in plan(graph(node("linear"), backward=backward[1:])).full()


def test_totals() -> None:
    made = plan(graph(casts=3, ends_with="a print"), graph(left="no"), repairs=("fc is FP32",))
    lines = str(made).splitlines()
    for line in (
        "Casts: 3", "a graph stays in FP32: no", "graph break: a print", "repaired: fc is FP32",
        "Saved for the backward: 0 B",
    ):  # fmt: skip
        assert line in lines


def test_rich_colours_it() -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True, color_system="standard")
    made = plan(graph(node("a", module="low"), node("b", module="full", precision="FULL")))
    console.print(made)
    text = shown.getvalue()
    assert re.search(r"\x1b\[32mlow", text)
    assert re.search(r"\x1b\[33mfull", text)
    assert max(map(len, re.sub(r"\x1b\[[\d;]*m", "", text).splitlines())) <= 80
    assert "\x1b" not in str(made)


def test_markup_in_a_plan_is_text() -> None:
    shown = io.StringIO()
    rich.print(plan(graph(node("a", reason="[red]x[/red]"))), file=shown)
    assert "[red]x" in shown.getvalue().replace("\n", "")


def test_rows_without_titles() -> None:
    grid = Grid((), indent=2)
    assert str(grid) == ""
    grid.add("a", "b")
    grid.add("long", "c")
    assert str(grid) == "  a     b\n  long  c"


def test_twice_the_plan_is_twice_the_work_to_print() -> None:
    twice, once = (lines_run(large(count).__str__) for count in (2000, 1000))
    assert twice < 2.2 * once
