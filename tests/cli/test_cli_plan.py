"""`mpcompile plan`: what it prints, and what a factory that is none gets."""

import json
import re
import sys
from pathlib import Path

import pytest
from factories import squeezed

from mpcompile import cli

NETS = """
import torch
from torch import nn

def good():
    return nn.Linear(8, 8), (torch.ones(8, 8),)

def one(): return nn.Linear(8, 8)
def tensor(): return nn.Linear(8, 8), torch.ones(8, 8)
def swapped(): return (torch.ones(8, 8),), nn.Linear(8, 8)
def fails(): raise OSError("no such weights")
number = 3
net = nn.Linear(8, 8)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the current directory, forgotten afterwards."""
    (tmp_path / "some_nets.py").write_text(NETS)
    (tmp_path / "broken_nets.py").write_text("import not_there_either\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("some_nets", "broken_nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("nets")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "v100", "--level", "O2", "--recompute", "--mp-optimizer"]
    assert cli.main(["plan", "some_nets:good", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Linear at O2: 1 of 1 products in FP16, 100.0% of ")
    assert re.search(r" FP16 +yes +1.0 kFLOP +m 8, n 8, k 8", out)


@pytest.mark.usefixtures("nets")
def test_the_command_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "t4", "--json", "--dump", str(tmp_path / "graphs")]
    assert cli.main(["plan", "some_nets:good", *arguments]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["gpu"]["name"] == "Tesla T4"
    assert data["graphs"][0]["tensor_cores"]["share"] == 1.0
    assert data["saved_bytes"] == 2 * 8 * 8
    assert data["unknown"]
    assert list((tmp_path / "graphs").rglob("plan.json"))


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("some_nets", "write the factory as pkg.module:factory"),
        ("some_nets.good", "did you mean some_nets:good?"),
        ("some_nets.py:good", "name the module, not its file; did you mean some_nets:good?"),
        ("./some_nets.py:good", "name the module, not its file; did you mean some_nets:good?"),
        ("no_nets:good", "there is no module 'no_nets' in the current directory"),
        ("broken_nets:good", "broken_nets can't be imported: ModuleNotFoundError: No module named"),
        ("some_nets:godo", "some_nets has no 'godo'; did you mean 'good'?"),
        ("some_nets:number", "some_nets:number is a int, not a function"),
        ("some_nets:net", "some_nets:net is a Linear, not a function"),
        ("some_nets:fails", "some_nets:fails() fails: OSError: no such weights ("),
        ("some_nets:one", "returned a Linear; factory() must return (model, args) or"),
        ("some_nets:tensor", "returned a Tensor as args; factory() must return"),
        ("some_nets:swapped", "returned a tuple as the model; factory() must return"),
    ],
)
def test_a_factory_that_is_none(
    target: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", target]) == 2
    captured = capsys.readouterr()
    assert message in squeezed(captured.err)
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_an_unknown_gpu_is_found_before_the_factory_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", "no_nets:good", "--device", "h10"]) == 2
    assert "unknown GPU 'h10'; did you mean 'h100'?" in squeezed(capsys.readouterr().err)


def test_the_help_says_what_a_factory_returns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    assert "factory() must return (model, args) or (model, args, kwargs)" in squeezed(
        capsys.readouterr().out
    )
