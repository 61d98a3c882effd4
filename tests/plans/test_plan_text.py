"""`print(plan)`: whole lines, aligned, then the backward and the totals."""

from __future__ import annotations

import io
import re

import rich
from effort import lines_run
from plans import cast, graph, large, node, plan
from rich.console import Console
from small_calls import Calls, X, in_two_graphs

from mpcompile import plan_for
from mpcompile.plans.graph_plan import BackwardNode
from mpcompile.plans.grid import Grid


def test_columns_are_aligned_and_whole() -> None:
    reason = "a reason as long as reasons can be, " * 12
    text = str(plan(graph(node("a", reason=reason), node("a_long_name_層", planned="f32[8, 4]"))))
    head, first, second = text.splitlines()[2:5]
    assert head.split() == [
        "node",
        "op",
        "before",
        "->",
        "after",
        "precision",
        "rule",
        "module",
        "source",
        "reason",
    ]
    assert first.endswith(reason.rstrip())
    assert first.index("linear") == head.index("op")
    assert second.index("linear") == head.index("op") - 1  # the sign is two cells wide
    assert first[head.index("before") :].startswith("f32[8, 4] -> f16[8, 4]  LOW")


def test_a_type_that_stays_stands_once() -> None:
    text = str(plan(graph(node("a", planned="f32[8, 4]"), cast("b", "a"))))
    assert "->" not in text.splitlines()[3]
    assert "->" not in text.splitlines()[4]


def test_each_graph_has_its_number() -> None:
    text = str(plan_for(Calls(in_two_graphs), X, device="t4"))
    numbers = re.findall(r"^O1 float16 on cuda:0, graph (\d): ", text, re.M)
    assert numbers == ["0", "1"]
    assert "graph 0" not in str(plan(graph(node("a"))))


def test_the_backward_follows_the_forward() -> None:
    backward = (
        BackwardNode("gelu_1", "aten::gelu", "f16[8, 4]", "gelu", recomputed=True),
        BackwardNode("mm_1", "aten::mm", "f16[4, 4]", "linear"),
    )
    text = str(plan(graph(node("linear"), backward=backward)))
    assert "backward: 2 operators, 1 of them compute a value of the forward again\n" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
    assert rows[1:] == [
        ["gelu_1", "gelu", "f16[8,", "4]", "gelu", "recomputed"],
        ["mm_1", "mm", "f16[4,", "4]", "linear"],
    ]
    assert text.index("\nlinear ") < text.index("\nbackward:") < text.index("Casts: ")
    assert "\nbackward:" not in str(plan(graph(node("linear"))))


def test_totals() -> None:
    made = plan(graph(casts=3, ends_with="a print"), graph(left="no"), repairs=("fc is FP32",))
    lines = str(made).splitlines()
    for line in (
        "Casts: 3",
        "a graph stays in FP32: no",
        "graph break: a print",
        "repaired: fc is FP32",
        "Saved for the backward: 0 B",
    ):
        assert line in lines


def test_rich_colours_it() -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True, color_system="standard")
    made = plan(graph(node("low"), node("full", precision="FULL"), cast("added", "low")))
    console.print(made)
    text = shown.getvalue()
    assert re.search(r"\x1b\[32mlow", text)
    assert re.search(r"\x1b\[33mfull", text)
    assert re.search(r"\x1b\[2madded", text)
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
