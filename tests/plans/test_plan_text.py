"""`print(plan)`: whole lines, aligned, then the backward and the totals; and `plan.why(name)`."""

import contextlib
import functools
import io
import re
from typing import Any

import pytest
import rich
import torch
from module_of import module_of
from plans import cast, graph, large, lines_run, node, plan
from rich.console import Console
from small_calls import Calls, X, in_two_graphs
from torch import nn

from mpcompile import MPCompileError, plan_for
from mpcompile.devices.gpus import gpu
from mpcompile.planner.graph_plan import GraphPlan
from mpcompile.planner.grid import Grid
from mpcompile.planner.min_cut import NEVER, MinimumCut
from mpcompile.planner.partitioned import BackwardNode
from mpcompile.planner.tensor_core_report import TensorCoreOp, TensorCoreReport
from mpcompile.plans import Plan


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


def block() -> nn.Module:
    return module_of(lambda self, x: self.act(self.fc(x)), fc=nn.Linear(61, 61), act=nn.GELU())


NET = module_of(
    lambda m, x: m.blocks(x).softmax(-1),
    blocks=nn.Sequential(block(), block()), unused=nn.Linear(4, 4),
)  # fmt: skip
PLANNED = plan_for(NET, torch.ones(8, 61), device="t4", pad="always")


def lines(text: str, label: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith(label)]


def test_a_node() -> None:
    text = PLANNED.why("linear_1")
    found = next(n for n in PLANNED.nodes if n.name == "linear_1")
    assert text.startswith(f"linear_1 in graph 0: FP16, decided by table: {found.reason}\n")
    for side in ("before", "after"):
        (line,) = (x for x in getattr(PLANNED.graphs[0], side) if x.name == "linear_1")
        assert lines(text, side)[0].endswith(line.text)
    assert lines(text, "operator")[0].endswith(" aten::linear")
    assert lines(text, "module")[0].endswith(" blocks.1.fc")
    assert lines(text, "Tensor Cores")[0].endswith("m 8, n 61 -> 64, k 61 -> 64; padded")
    assert lines(text, "to change it")[0].endswith(found.change)
    assert repr(text) == str(text)


def test_its_frames() -> None:
    text = PLANNED.why("softmax")
    found = next(n for n in PLANNED.nodes if n.name == "softmax")
    assert found.frames
    assert lines(text, "source")[0].endswith(f" {found.frames[0]}")
    assert found.frames[-1].startswith("test_plan_text.py:")
    assert lines(plan(graph(node("a"))).why("a"), "source")[0].endswith(" net.py:7")


def test_the_casts_and_pads_around_it() -> None:
    """Chains of them, up to the program's nodes: a cast, then a pad; a cut, then a cast."""
    chain = [
        node("a"), cast("a_f16", "a"),
        cast("a_f16_padded", "a_f16", rule="pad", reason="61 -> 64 for b"),
        node("b", reads=("a_f16_padded", "w")), cast("b_cut", "b", rule="pad", reason="64 -> 61"),
        cast("b_f32", "b_cut", reason="c reads f32"), node("c", reads=("b_f32",)),
        cast("c_f32", "c"),
    ]  # fmt: skip
    text = plan(graph(*chain)).why("b")
    around = {"it reads": ["a_f16", "a_f16_padded"], "is read by": ["b_cut", "b_f32"]}
    for label, names in around.items():
        assert [line.split(":")[0].split()[-1] for line in lines(text, label)] == names
    assert lines(text, "it reads")[1].endswith("pad: 61 -> 64 for b")
    assert "casts and pads" not in plan(graph(node("a"))).why("a")


def test_its_costs() -> None:
    """`b` costs nothing itself and follows `a`, for a cast between the two costs something."""
    low, full = {"time": 16_000, "doubt": 1_600}, {"time": 48_000, "stored": 384}
    cut = MinimumCut(("a", "b"), (low, {}), (full, {}), ((0, 1, 32, 32),))
    text = plan(graph(node("a"), node("b"), cuts=(cut,))).why("a")
    rows = [re.split("  +", line.strip()) for line in text.splitlines()[-7:]]
    assert [row[1:] for row in rows[:-1]] == [
        ["FP16, as planned", "FP32"], ["1,000", "3,000"], ["100", "0"], ["0", "24"], ["0", "0"],
        ["1,100", "3,024"],
    ]  # fmt: skip
    assert rows[1][0].startswith("estimated times")
    assert rows[-1] == ["FP32 would take along: b"]
    assert "as planned" not in plan(graph(node("a"))).why("a")


@pytest.mark.parametrize(
    ("low", "says"),
    [
        ({}, "the same in either: then FP32"),
        ({"x is FP32": NEVER}, "never FP16, whatever it costs: x is FP32"),
    ],
)
def test_where_no_cost_decides(low: dict[str, int], says: str) -> None:
    cut = MinimumCut(("a",), (low,), ({},), ())
    assert plan(graph(node("a"), cuts=(cut,))).why("a").splitlines()[-1] == f"  {says}"


def test_its_backward() -> None:
    backward = (
        BackwardNode("mm", "aten::mm", "f16[4, 4]", "a"),
        BackwardNode("gelu_1", "aten::gelu", "f16[8, 4]", "b", recomputed=True),
        BackwardNode("odd", "aten::sum", "f32[]", ""),
    )
    found = plan(graph(node("a"), node("b"), backward=backward))
    assert lines(found.why("a"), "backward")[0].endswith("mm: f16[4, 4] = mm, of the gradient of a")
    assert found.why("gelu_1").startswith("gelu_1 in the backward in graph 0: ")
    assert "computes again b" in found.why("gelu_1")
    assert "\nb in graph 0: FP16" in found.why("gelu_1")
    assert found.why("odd").endswith("odd: f32[] = sum")


def test_a_name_in_several_graphs() -> None:
    text = plan_for(Calls(in_two_graphs), X, device="t4").why("linear")
    assert "linear in graph 0: " in text
    assert "linear in graph 1: " in text


def test_an_input() -> None:
    name = PLANNED.graphs[0].before[-1].name
    inputs = [line.name for line in PLANNED.graphs[0].before if " = input" in line.text]
    assert "nothing to decide" in PLANNED.why(inputs[0])
    assert name not in inputs


def test_a_module() -> None:
    text = PLANNED.why("blocks.0.fc")
    assert text.startswith("module blocks.0.fc in graph 0\nnode")
    assert "blocks.1" not in text
    assert len([line for line in text.splitlines() if line.startswith("linear ")]) == 1


def test_a_module_and_what_is_in_it() -> None:
    text = PLANNED.why("blocks.0")
    assert all(f" {path} " in text for path in ("blocks.0.fc", "blocks.0.act"))
    assert "blocks.1" not in text
    assert "softmax" in PLANNED.why("")
    assert PLANNED.why("").startswith("the model itself in graph 0\n")


def test_the_end_of_a_path() -> None:
    text = PLANNED.why("act")
    assert "module blocks.0.act in" in text
    assert "module blocks.1.act in" in text
    assert "fc " not in text


def test_a_module_without_an_operator() -> None:
    assert PLANNED.why("unused") == "module unused: no operator of a rewritten graph comes from it"
    assert plan(graph(left="it branches")).why("fc").endswith("; graphs stay in FP32: it branches")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("linaer_1", "did you mean 'linear_1'?"),
        ("blocks.0.cf", "did you mean 'blocks.0.fc'?"),
        ("moon", "$"),
    ],
)
def test_an_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(MPCompileError, match=f"no node and no module '{name}'.*{hint}"):
        PLANNED.why(name)


@pytest.mark.parametrize("name", ["linear_499", "attn", "moon"])
def test_twice_the_plan_is_twice_the_work_to_ask(name: str) -> None:
    def ask(found: Plan) -> None:
        with contextlib.suppress(MPCompileError):  # there is no moon
            found.why(name)

    twice, once = (lines_run(functools.partial(ask, large(count))) for count in (2000, 1000))
    assert twice < 2.5 * once
