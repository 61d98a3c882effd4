"""`plan.why(name)`: what is told about a node, and about a module."""

import contextlib
import functools
import re

import pytest
import torch
from module_of import module_of
from plans import cast, graph, large, lines_run, node, plan
from small_calls import Calls, X, in_two_graphs
from torch import nn

from mpcompile import MPCompileError, plan_for
from mpcompile.planner.min_cut import NEVER, MinimumCut
from mpcompile.planner.partitioned import BackwardNode
from mpcompile.plans import Plan


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
    assert found.frames[-1].startswith("test_plan_why.py:")
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
    rows = [line for line in text.splitlines() if line.startswith("linear ")]
    assert len(rows) == 1


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
    left = plan(graph(left="it branches"))
    assert left.why("fc").endswith("; graphs stay in FP32: it branches")


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
