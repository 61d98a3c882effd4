"""A report: its totals, its text, its JSON, its page."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from module_of import module_of
from page_parser import Page
from reports import faulty, histogram, node, numbers, report
from torch import nn

import mpcompile
from mpcompile import diagnose
from mpcompile.diagnosis.report import UpdateErrors, render
from mpcompile.observe.record import EXPONENTS, Shares
from mpcompile.planner.graph_plan import GraphPlan

# -- what diagnose counts --------------------------------------------------------------------------


def scaled() -> Any:
    """Multiplies by a weight, and lets half of the results through."""
    weight = nn.Parameter(torch.tensor([1.0, -1.0, 2.0, -2.0]))
    return module_of(lambda m, x: torch.relu(x * m.weight), weight=weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zeros_of_activation_gradients_are_counted(dtype: torch.dtype) -> None:
    """Of relu: four times 8. Of the product: 8 where it is positive, else 0. The weight's own
    gradient, 8 * x, is none of an activation.
    """
    found = diagnose(scaled(), torch.full((4,), 3.0), loss_fn=lambda y: 8 * y.sum(), dtype=dtype)
    counted = dict(zip(EXPONENTS, found.histogram, strict=True))
    assert {exponent: n for exponent, n in counted.items() if n} == {3: 6}
    assert found.zeros == 2


def test_totals_weigh_nodes_by_their_elements() -> None:
    """By hand: (0.5 * 100 + 0 * 300) / 400, (0.1 * 300) / 400, (0.2 * 300) / 400."""
    found = faulty().value_shares
    assert (found.flushed, found.subnormal) == (0.125, pytest.approx(0.075))
    assert (found.overflowed, found.count) == (pytest.approx(0.15), 400)
    assert faulty().gradient_shares == Shares(0.25, 0.5)
    assert report().value_shares.count == 0


# -- text ------------------------------------------------------------------------------------------


def test_the_text_has_everything() -> None:
    found = faulty()
    text = str(found)
    for line in (
        "Net, O1 float16 on cpu",
        "loss scale: 1024; no scale makes a forward finite",
        "overflow: blocks.2.down (net.py:7): linear_1 = aten::linear",
        "    its result doesn't fit float16",
        "    called from net.py:30",
        "    to keep it in FP32: policy=Policy(nodes={'linear_1': 'fp32'})",
        "note: one thing could not be found out",
    ):
        assert line in text.splitlines(), line
    assert str(found.first) in text
    for cells in (
        ("loss", "nan", "1.25", "1.25"),
        ("1.2e-01", "-", "linear_1", "linear", "f16[2]", "blocks.2.down", "net.py:7"),
        ("1.0e-03", "1.0e-07", "exp", "exp", "f16[2]", "blocks.2", "net.py:8"),
        ("12.50%", "7.50%", "15.00%", "400", "all values"),
        ("25.00%", "50.00%", "0.00%", "8", "all gradients"),
        ("50.00%", "0.00%", "0.00%", "100", "exp", "blocks.2", "net.py:8"),
        ("25.00%", "50.00%", "0.00%", "8", "gradient of exp", "blocks.2", "net.py:8"),
        ("75.00%", "1.0e-05", "weight"),
    ):
        assert re.search(r"^ *" + " +".join(map(re.escape, cells)) + "$", text, re.M), cells
    assert " bias" not in text  # its updates all move
    assert "no fault found" not in text


def test_worst_come_first_and_are_few() -> None:
    errors = [3e-4, 5e-1, 0.0, *(1e-5 * i for i in range(1, 30))]
    nodes = tuple(numbers(node(f"n{i}"), error=error) for i, error in enumerate(errors))
    shown = re.findall(r"^ +\d\S+ +- +(n\d+) ", str(report(nodes=nodes)), re.M)
    assert shown == ["n1", "n0", "n31", "n30", "n29", "n28", "n27", "n26"]
    assert "n2 " not in str(report(nodes=(nodes[2],)))  # not off at all
    stalled = tuple(UpdateErrors(f"p{i}", 1e-4, i / 100) for i in range(50))
    assert re.findall(r"p\d+", str(report(updates=stalled)))[:2] == ["p49", "p48"]


def test_overflow_is_worse_than_few_bits() -> None:
    nodes = (
        numbers(node("n0"), shares=Shares(0, 0.5, 0, count=9)),
        numbers(node("n1"), shares=Shares(0, 0.9, 0, count=9)),
        numbers(node("n2"), shares=Shares(0.05, 0, 0, count=9)),
        numbers(node("n3"), shares=Shares(0, 0, 0.1, count=9)),
        numbers(node("n4"), shares=Shares(count=9)),
    )
    assert re.findall(r"\bn\d\b", str(report(nodes=nodes))) == ["n3", "n2", "n1", "n0"]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"suggested_scale": None}, "loss scale: 1024; no gradient above zero is stored in float16,"
         " so every scale fits"),
        ({"suggested_scale": None, "scale": None, "dtype": "bfloat16"}, "loss scale: none; "
         "bfloat16 has the range of FP32"),
    ],
)  # fmt: skip
def test_the_loss_scale_in_words(fields: dict[str, Any], line: str) -> None:
    assert line in str(report(**fields)).splitlines()


def test_small_shares_are_not_zero() -> None:
    nodes = (numbers(node("n"), shares=Shares(1e-6, 0, 0.0, count=10**7)),)
    assert re.search(r"<0.01% +0.00% +0.00% +10000000 +n$", str(report(nodes=nodes)), re.M)


def test_the_text_is_whole_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(faulty())
    monkeypatch.setenv("COLUMNS", "20")
    assert str(faulty()) == text
    assert "\x1b" not in text
    assert text.isascii()


# -- JSON ------------------------------------------------------------------------------------------


def test_to_dict_is_whole_json() -> None:
    found = faulty()
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert {field.name for field in dataclasses.fields(found)} <= data.keys()
    fields = {field.name for field in dataclasses.fields(found.nodes[0])}
    assert [set(one) for one in data["nodes"]] == [fields | {"module"}] * 2
    assert [one["node"] for one in data["nodes"]] == ["exp", "linear_1"]
    assert data["graphs"][0]["nodes"][1]["name"] == "linear_1"
    (fault,) = data["faults"]
    assert (fault["kind"], fault["node"]["frames"]) == ("overflow", ["net.py:30", "net.py:7"])
    assert data["pins"] == ["linear_1"]
    assert data["losses"] == {"low": None, "fp32": 1.25, "fp64": 1.25}
    assert data["nodes"][0]["gradient"]["amin"] is None  # infinity: no gradient above zero
    assert data["nodes"][1]["shares"]["count"] == 300
    assert data["value_shares"]["flushed"] == 0.125
    first, after = data["exponents"]
    assert len(data["histogram"]) == after - first
    assert data["histogram"][-20 - first] == 20
    assert data["zeros"] == 30
    assert data["versions"] == {"mpcompile": mpcompile.__version__, "torch": torch.__version__}


def test_save(tmp_path: Path) -> None:
    faulty().save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == faulty().to_dict()


# -- the page --------------------------------------------------------------------------------------


def test_the_page_holds_the_report() -> None:
    found = faulty()
    page = Page(render(found))
    text = " ".join(" ".join(page.texts).split())
    for part in (
        "overflow blocks.2.down net.py:7 its result doesn't fit float16 linear_1 = aten::linear",
        'To keep it in FP32: policy=Policy(nodes={"linear_1": "fp32"})',
        "Called from net.py:30",
        "one thing could not be found out",
        "Loss in FP16 nan in FP32 1.25, in FP64 1.25",
        "Loss scale 1024 no scale makes a forward finite",
        "FP16 values that become zero 12.50% subnormal 7.50%, overflow 15.00%, of 400",
        "FP16 gradients that become zero 25.00% subnormal 50.00%",
        "activation gradients times the loss scale, 1024",
    ):
        assert part in text, part
    assert "no fault" not in text
    exp, linear = page.data["graphs"][0]["nodes"]
    of_exp = exp["numbers"]
    assert (exp["name"], of_exp["error"], of_exp["gradient"]["amin"]) == ("exp", 1e-3, None)
    assert linear["faults"] == ["overflow: its result doesn't fit float16"]
    assert [u["parameter"] for u in page.data["updates"]] == ["bias", "weight"]


def test_the_fault_leads_to_its_node() -> None:
    """Also where the node has no numbers: it is in the plan."""
    for found in (faulty(), dataclasses.replace(faulty(), nodes=())):
        html = render(found)
        assert re.findall(r'data-key="([^"]+)">(\w+)', html) == [("0/linear_1", "linear_1")]
        data = Page(html).data
        assert [n["numbers"] is None for n in data["graphs"][0]["nodes"]] == [not found.nodes] * 2


def test_bars_are_drawn() -> None:
    """At 2**-40, -20, 0, 10 and zero, as they are; then times 2**10, at 2**-30, -10, 10 and 20."""
    page = Page(render(faulty()))
    kinds = [value for tag, name, value in page.attributes if (tag, name) == ("rect", "class")]
    assert kinds == [*("lost", "subnormal", "normal", "normal", "zeros"),
                     *("lost", "normal", "normal", "lost", "zeros")]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said", "fine"),
    [
        ({}, "no fault found", True),
        ({"losses": {"low": float("inf")}}, "the loss is not finite, but no operator made it so",
         False),
        ({"graphs": (GraphPlan("O0", "float32", "cpu", left="no"),)},
         "nothing was looked at: no graph was rewritten", False),
    ],
)  # fmt: skip
def test_what_is_said_without_faults(fields: dict[str, Any], said: str, fine: bool) -> None:
    """The same as text and on the page, of which a report of nothing has one, too."""
    found = report(**fields)
    text, page = str(found), Page(render(found))
    assert said in text
    assert "all values" not in text
    assert "largest errors" not in text
    assert said in page.texts
    assert "There is no histogram" in " ".join(page.texts)
    assert (("p", "class", "fault none") in page.attributes) == fine


def test_the_page_of_a_large_model_is_small() -> None:
    lines = [node(f"n{i}", frames=("model.py:1",) * 8, reason="x" * 80) for i in range(2000)]
    made = report(
        nodes=tuple(map(numbers, lines)),
        histogram=histogram({0: 1}),
        graphs=(GraphPlan("O1", "float16", "cpu", tuple(lines)),),
    )
    assert len(render(made).encode()) < 3_000_000
