"""The page of a report as text: what it says, what it can't be made to do, and its size."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from page_parser import Page
from reports import EVIL, faulty, histogram, node, numbers, report

from mpcompile import MPCompileError
from mpcompile.diagnosis.report_page import render
from mpcompile.plans.graph_plan import GraphPlan


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
    assert "No fault" not in text
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


def test_a_report_of_nothing_has_a_page() -> None:
    text = " ".join(Page(render(report())).texts)
    assert "No fault was found" in text
    assert "There is no histogram" in text
    assert "but the loss is not finite" not in text
    lost = report(losses={"low": float("inf")})
    assert "but the loss is not finite" in " ".join(Page(render(lost)).texts)


def test_no_name_becomes_markup() -> None:
    html = render(faulty(EVIL))
    page = Page(html)
    assert EVIL not in html
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.data["graphs"][0]["nodes"][1]["module"] == f"blocks.2.down{EVIL}"


def test_the_page_may_load_nothing() -> None:
    html = render(faulty())
    (policy,) = re.findall(r'content="(default-src[^"]*)"', html)
    assert re.fullmatch(r"default-src 'none'; style-src '\S+'; script-src '\S+'", policy)
    assert "unsafe" not in policy
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://|innerHTML""", html)


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "report.html", tmp_path):
        with pytest.raises(
            MPCompileError, match=r"page of the report can't be written to .*; give"
        ):
            faulty().to_html(path)
    faulty().to_html(str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render(faulty())


def test_the_page_of_a_large_model_is_small() -> None:
    lines = [node(f"n{i}", frames=("model.py:1",) * 8, reason="x" * 80) for i in range(2000)]
    made = report(
        nodes=tuple(map(numbers, lines)),
        histogram=histogram({0: 1}),
        graphs=(GraphPlan("O1", "float16", "cpu", tuple(lines)),),
    )
    assert len(render(made).encode()) < 3_000_000
