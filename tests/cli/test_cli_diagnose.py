"""`mpcompile diagnose`: what it prints and writes, and its exit status."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import NETS, nets, squeezed
from reports import faulty, report
from rich.console import Console

from mpcompile import cli
from mpcompile.cli.common import show_tables
from mpcompile.diagnosis.report import Report

__all__ = ["nets"]

Captured = pytest.CaptureFixture[str]
HUGE = ["diagnose", "some_nets:huge", "--dtype", "float16"]


@pytest.mark.usefixtures("nets")
def test_the_report(capsys: Captured) -> None:
    """1000 * 30 * 8 is more than FP16 holds: in the second layer."""
    line = NETS[: NETS.index("return self.down(")].count("\n") + 1
    assert cli.main(HUGE) == 0
    captured = capsys.readouterr()
    assert f"overflow: down (some_nets.py:{line}): linear_1 = aten::linear" in captured.out
    assert captured.err == ""


@pytest.mark.usefixtures("nets")
def test_files_and_json(tmp_path: Path, capsys: Captured) -> None:
    assert cli.main([*HUGE, "--json", "--html", "r.html"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["pins"], data["losses"]["low"]) == (["linear_1"], None)
    assert "<title>Net: what its numbers do</title>" in (tmp_path / "r.html").read_text()


@pytest.mark.usefixtures("nets")
def test_the_loss_of_the_factory(capsys: Captured) -> None:
    """The FP32 losses of the mean, and of the cube of the sum over 64 elements."""
    losses = {}
    for factory in ("good", "cubed"):
        arguments = ["diagnose", f"some_nets:{factory}", "--dtype", "bfloat16", "--json"]
        torch.manual_seed(0)
        assert cli.main(arguments) == 0
        losses[factory] = json.loads(capsys.readouterr().out)["losses"]["fp64"]
    assert losses["cubed"] == pytest.approx((64 * losses["good"]) ** 3, rel=1e-3)


# -- what it hands over ----------------------------------------------------------------------------


@pytest.fixture
def diagnosed(nets: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the diagnosis; `diagnosed["report"]` is what it returns."""
    seen: dict[str, Any] = {"report": report()}

    def diagnose_call(model: Any, args: Any, kwargs: Any, **given: Any) -> Report:
        seen.update(given, model=model, args=args)
        return seen["report"]

    monkeypatch.setattr(cli.model, "diagnose_call", diagnose_call)
    return seen


def test_only_given_options_are_handed_over(diagnosed: dict[str, Any]) -> None:
    assert cli.main(["diagnose", "some_nets:good"]) == 0
    assert diagnosed["options"] == {}
    assert (diagnosed["steps"], diagnosed["loss_fn"]) == (1, None)
    flags = ["--level", "O2", "--loss-scale", "1000", "--recompute", "--steps", "3"]
    assert cli.main(["diagnose", "some_nets:cubed", *flags]) == 0
    assert diagnosed["options"] == {"level": "O2", "loss_scale": 1000.0, "recompute": True}
    assert diagnosed["steps"] == 3
    assert callable(diagnosed["loss_fn"])
    assert cli.main(["diagnose", "some_nets:good", "--loss-scale", "none"]) == 0
    assert diagnosed["options"] == {"loss_scale": "none"}


def test_the_device(diagnosed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.model, "known_device", torch.device)
    assert cli.main(["diagnose", "some_nets:cubed", "--device", "meta"]) == 0
    assert {p.device.type for p in diagnosed["model"].parameters()} == {"meta"}
    assert {x.device.type for x in diagnosed["args"]} == {"meta"}


@pytest.mark.usefixtures("nets")
def test_options_of_a_compiled_model_hold(capsys: Captured) -> None:
    assert cli.main(["diagnose", "some_nets:compiled"]) == 0
    assert capsys.readouterr().out.startswith("Net, O2 float16 on cpu\n")
    assert cli.main(["diagnose", "some_nets:compiled", "--level", "O1"]) == 0
    assert capsys.readouterr().out.startswith("Net, O1 float16 on cpu\n")


# -- the exit status -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (faulty(), "--fail-on-fault: faults: 1: overflow: blocks.2.down (net.py:7): linear_1"),
        (report(losses={"low": float("nan"), "fp32": 1.0}), "--fail-on-fault: the loss is nan"),
    ],
)
def test_fail_on_fault(
    found: Report, message: str, diagnosed: dict[str, Any], capsys: Captured
) -> None:
    diagnosed["report"] = found
    assert cli.main(["diagnose", "some_nets:good", "--fail-on-fault"]) == 1
    captured = capsys.readouterr()
    assert message in squeezed(captured.err)
    assert captured.out.strip() == str(found).strip()  # shown all the same
    assert cli.main(["diagnose", "some_nets:good"]) == 0  # nobody asked
    assert capsys.readouterr().err == ""
    diagnosed["report"] = report()
    assert cli.main(["diagnose", "some_nets:good", "--fail-on-fault"]) == 0


@pytest.mark.usefixtures("nets")
def test_an_infinite_loss_fails(capsys: Captured) -> None:
    arguments = ["diagnose", "some_nets:infinite", "--dtype", "float16", "--fail-on-fault"]
    assert cli.main(arguments) == 1
    assert "mpcompile: --fail-on-fault: " in capsys.readouterr().err


def test_a_terminal_gets_colours() -> None:
    terminal = Console(force_terminal=True, width=200, color_system="standard")
    for console, coloured in ((terminal, True), (Console(force_terminal=False), False)):
        with console.capture() as shown:
            show_tables(console, faulty())
        assert ("\x1b[1;31moverflow: blocks.2.down" in shown.get()) == coloured
        assert re.sub(r"\x1b\[[\d;]*m", "", shown.get()).split() == str(faulty()).split()
