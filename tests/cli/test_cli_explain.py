"""`mpcompile explain`, or `plan`: what it prints, its conditions for a CI, and its exit status."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from factories import nets, squeezed
from reports import node

from mpcompile import cli
from mpcompile.planner.graph_plan import GraphPlan
from mpcompile.planner.plan_data import OutsideLine
from mpcompile.planner.tensor_core_report import TensorCoreOp, TensorCoreReport
from mpcompile.plans.model_plan import Plan

__all__ = ["nets"]

Captured = pytest.CaptureFixture[str]


# -- what it prints --------------------------------------------------------------------------------


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    "call", ["explain some_nets:good", "explain some_nets:named", "plan some_nets:cubed"]
)
def test_the_plan(call: str, capsys: Captured) -> None:
    """Two products of 8 x 8 x 8: aligned, and low. So no condition of a CI holds."""
    arguments = ["--device", "v100", "--level", "O2", "--recompute", "--mp-optimizer"]
    assert cli.main([*call.split(), *arguments, SHARE[0], "1", FALLBACK, BREAK]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Net at O2: 2 of 2 products in FP16, 100.0% of ")
    assert "\non Tesla V100-SXM2-16GB; Tensor Cores: FP16 (Volta" in captured.out
    assert re.search(r" FP16 +yes +1.0 kFLOP +m 8, n 8, k 8", captured.out)
    assert "_f16 " not in captured.out
    assert captured.err == ""


@pytest.mark.usefixtures("nets")
def test_json_and_a_dump(tmp_path: Path, capsys: Captured) -> None:
    arguments = ["--device", "t4", "--json", "--dump", str(tmp_path / "graphs")]
    assert cli.main(["plan", "some_nets:linear", *arguments]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["gpu"]["name"] == "Tesla T4"
    assert data["graphs"][0]["tensor_cores"]["share"] == 1.0
    assert data["saved_bytes"] == 2 * 8 * 8
    assert data["unknown"]
    assert list((tmp_path / "graphs").rglob("plan.json"))


@pytest.mark.slow("whole commands")
@pytest.mark.usefixtures("nets")
def test_json_why_and_diff(tmp_path: Path, capsys: Captured) -> None:
    explain = ["explain", "some_nets:good", "--device", "t4"]
    assert cli.main([*explain, "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["gpu"]["name"] == "Tesla T4"
    (tmp_path / "before.json").write_text(text)

    assert cli.main([*explain, "--why", "up"]) == 0
    assert "linear" in (why := capsys.readouterr().out)
    assert cli.main([*explain, "--why", "up", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["why"].strip() == why.strip()

    assert cli.main([*explain, "--diff", "before.json"]) == 0
    assert capsys.readouterr().out == "the plans are equal\n"
    other = [*explain, "--level", "O2", "--diff", "before.json"]
    assert cli.main(other) == 0
    assert "level O1 O2" in squeezed(capsys.readouterr().out)  # the earlier one first
    assert cli.main([*other, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["level"] == ["O1", "O2"]


@pytest.mark.usefixtures("nets")
def test_html(tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["explain", "some_nets:good", "--html", "new/plan.html"]) == 0
    page = (tmp_path / "new" / "plan.html").read_text()
    assert "<title>Net: mixed-precision plan</title>" in page
    verdict, written = capsys.readouterr().out.splitlines()
    assert verdict.startswith("Net at O1: ")
    assert written == "written to new/plan.html"


@pytest.mark.usefixtures("nets")
def test_all_of_it(capsys: Captured) -> None:
    assert cli.main(["explain", "some_nets:good", "--device", "t4", "--all"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^linear +linear +f32\[8, 8\] -> f16\[8, 8\] +FP16 ", out, re.M)
    assert "_f16 " in out
    assert "\nbackward: " in out


# -- what it hands over ----------------------------------------------------------------------------


@pytest.fixture
def planned(nets: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the planner; `planned["plan"]` is what it returns, the rest what it was given."""
    seen: dict[str, Any] = {"plan": plan_with(GraphPlan("O1", "float16", "cuda:0"))}

    def plan_call(model: Any, args: Any, kwargs: Any, **given: Any) -> Plan:
        seen.update(given, model=type(model).__name__, args=args, kwargs=kwargs)
        return seen["plan"]

    monkeypatch.setattr(cli.model, "plan_call", plan_call)
    return seen


def plan_with(*graphs: GraphPlan) -> Plan:
    return Plan("Net", "O1", "float16", "cuda:0", graphs)


def test_only_given_options_are_handed_over(planned: dict[str, Any]) -> None:
    """Those left out may stand in the factory's `mpcompile(model, ...)`."""
    assert cli.main(["explain", "some_nets:named"]) == 0
    assert planned["options"] == {}
    assert "mp_optimizer" not in planned
    assert (planned["device"], planned["model"], planned["args"]) == (None, "Net", ())
    assert list(planned["kwargs"]) == ["x"]
    flags = ["--dtype", "float16", "--level", "O3", "--pad", "never", "--fuse-head",
             "--disable-passes", "plan_pads", "--policy", "p.toml"]  # fmt: skip
    assert cli.main(["explain", "some_nets:good", *flags, "--mp-optimizer"]) == 0
    assert planned["options"] == {
        "dtype": "float16", "level": "O3", "pad": "never", "fuse_head": True,
        "disable_passes": ["plan_pads"], "policy": "p.toml",
    }  # fmt: skip
    assert planned["mp_optimizer"] is True


def test_the_device(planned: dict[str, Any]) -> None:
    for word, handed_over in (("auto", None), ("a100", "a100")):
        assert cli.main(["explain", "some_nets:good", "--device", word]) == 0
        assert planned["device"] == handed_over


@pytest.mark.usefixtures("nets")
def test_this_machine(capsys: Captured) -> None:
    """What the factory's model was compiled with holds, until the command line says otherwise."""
    assert cli.main(["explain", "some_nets:compiled", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["level"], data["dtype"], data["device"], data["gpu"]) == (
        "O2", "float16", "cpu", None,
    )  # fmt: skip
    assert cli.main(["explain", "some_nets:compiled", "--json", "--level", "O1"]) == 0
    assert json.loads(capsys.readouterr().out)["level"] == "O1"


# -- conditions ------------------------------------------------------------------------------------


def graph(share: float = 1.0, **fields: Any) -> GraphPlan:
    """A graph with this Tensor Core share of 1000 FLOPs."""
    ops = tuple(
        TensorCoreOp("mm", "aten::mm", "", "gemm", {}, {}, flops, yes, yes, "")
        for flops, yes in ((round(1000 * share), True), (round(1000 * (1 - share)), False))
    )
    return GraphPlan(
        "O1", "float16", "cuda:0", (node("mm"),), tensor_cores=TensorCoreReport(ops), **fields
    )


LEFT = GraphPlan("O0", "float32", "cuda:0", left="mylib::op writes to its input")
SHARE = ("--fail-under-tensor-core-share", "0.95")
FALLBACK, BREAK = "--fail-on-fp32-fallback", "--fail-on-graph-break"


@pytest.mark.parametrize(
    ("graphs", "flags", "message"),
    [
        ([graph(0.62)], SHARE, f"{SHARE[0]}: the Tensor Core share of the FLOPs is 0.62, which is "
         "0.33 less than 0.95"),
        ([graph(0.949)], SHARE, "is 0.949, which is 0.001 less than 0.95"),
        ([graph(), LEFT], SHARE, f"{SHARE[0]}: the share of a graph that stays in FP32 is not "
         "counted: mylib::op writes to its input"),
        ([graph(), LEFT], [FALLBACK], f"{FALLBACK}: 1 of 2 graphs stay in FP32: mylib::op writes "
         "to its input"),
        ([graph(ends_with="print was called"), graph()], [BREAK], f"{BREAK}: 1 graph breaks: "
         "print was called"),
    ],
)  # fmt: skip
def test_a_condition_that_holds(
    graphs: list[GraphPlan],
    flags: list[str],
    message: str,
    planned: dict[str, Any],
    capsys: Captured,
) -> None:
    planned["plan"] = plan_with(*graphs)
    assert cli.main(["explain", "some_nets:good", *flags]) == 1
    captured = capsys.readouterr()
    assert message in squeezed(captured.err)
    assert captured.err.count("mpcompile:") == 1
    assert captured.out.strip() == str(planned["plan"]).strip()  # the plan is shown all the same
    assert cli.main(["explain", "some_nets:good"]) == 0  # nobody asked
    assert capsys.readouterr().err == ""


def test_conditions_that_do_not_hold(planned: dict[str, Any], capsys: Captured) -> None:
    planned["plan"] = plan_with(graph(0.95))
    assert cli.main(["explain", "some_nets:good", *SHARE, FALLBACK, BREAK]) == 0
    assert capsys.readouterr().err == ""


def test_products_outside_of_the_graphs(planned: dict[str, Any], capsys: Captured) -> None:
    lines = tuple(OutsideLine(path, 300) for path in ("layers.0", "layers.1"))
    plan = dataclasses.replace(plan_with(graph(1.0)), outside=lines, share_in_graphs=0.625)
    planned["plan"] = plan
    assert cli.main(["explain", "some_nets:good", *SHARE, FALLBACK, BREAK]) == 1
    said = squeezed(capsys.readouterr().err)
    assert f"{SHARE[0]}: the Tensor Core share of the FLOPs is 0.625, which is 0.325 less" in said
    assert f"{FALLBACK}: outside of the graphs, in FP32: layers.0, layers.1 (37.5% of the" in said
    planned["plan"] = dataclasses.replace(plan, share_in_graphs=0.9901)
    assert cli.main(["explain", "some_nets:good", *SHARE, FALLBACK, BREAK]) == 0


def test_each_condition_is_named(planned: dict[str, Any], capsys: Captured) -> None:
    planned["plan"] = plan_with(graph(0.5, ends_with="print was called"), LEFT)
    arguments = ["explain", "some_nets:good", *SHARE, FALLBACK, BREAK, "--json"]
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    for flag in (SHARE[0], FALLBACK, BREAK):
        assert captured.err.count(f"mpcompile: {flag}: ") == 1
    assert json.loads(captured.out)["left_in_fp32"] == [LEFT.left]


@pytest.mark.usefixtures("nets")
def test_a_break_in_a_real_model(capsys: Captured) -> None:
    assert cli.main(["explain", "some_nets:broken", "--device", "t4", BREAK]) == 1
    assert f"mpcompile: {BREAK}: 1 graph breaks: " in capsys.readouterr().err


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("asked", ["", "--dtype float16 --level O2"])
def test_a_model_that_loses_its_share(asked: str, capsys: Captured) -> None:
    """In P100s there are no Tensor Cores; a dtype that is asked for by name runs low there, too."""
    arguments = ["--device", "p100", *asked.split(), *SHARE]
    assert cli.main(["explain", "some_nets:good", *arguments]) == 1
    assert "P100-SXM2-16GB has no Tensor Cores for float16" in squeezed(capsys.readouterr().err)


def test_the_help_says_what_a_factory_returns(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    said = squeezed(capsys.readouterr().out)
    assert "factory() must return (model, args) or (model, args, kwargs)" in said


def test_text_is_printed_as_it_is(planned: dict[str, Any], capsys: Captured) -> None:
    """Neither markup, nor names of emojis, nor lines longer than a terminal are changed."""
    reason = "[red]:smile:[/red]" + " long" * 60
    planned["plan"] = plan_with(dataclasses.replace(LEFT, left=reason))
    assert cli.main(["explain", "some_nets:good", FALLBACK]) == 1
    captured = capsys.readouterr()
    assert reason in captured.out
    assert reason in captured.err
