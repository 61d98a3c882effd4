"""The recipe of docs/ci.md, run as it stands."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from documents import COMMAND, blocks, fenced
from repository import ROOT

from mpcompile import cli

pytestmark = pytest.mark.slow("runs what the documents show")

PAGE = ROOT / "docs" / "ci.md"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """The commands of the page, by their names; the factories stand in `nets.py`."""
    (tmp_path / "nets.py").write_text("\n".join(blocks(PAGE)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    found: dict[str, list[list[str]]] = {}
    for name, arguments in re.findall(COMMAND, fenced(PAGE), re.M):
        found.setdefault(name, []).append([name, *shlex.split(arguments)])
    return found


def test_explain(
    recipe: dict[str, list[list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conditions, keep, diff, why = recipe["explain"]
    assert cli.main(conditions) == 0, capsys.readouterr().err
    assert (tmp_path / "plan.html").exists()
    capsys.readouterr()
    *keep, redirected, path = keep
    assert redirected == ">"
    assert cli.main(keep) == 0
    (tmp_path / path).write_text(capsys.readouterr().out)
    assert json.loads((tmp_path / path).read_text())["model"] == "GPT"
    assert cli.main(diff) == 0
    assert capsys.readouterr().out == "the plans are equal\n"
    assert cli.main(why) == 0
    assert "layer_norm" in capsys.readouterr().out
    assert cli.main([*conditions, "--device", "p100"]) == 1  # it has no Tensor Cores
    assert "P100-SXM2-16GB has no Tensor Cores for float16" in capsys.readouterr().err


def test_diagnose(recipe: dict[str, list[list[str]]], capsys: pytest.CaptureFixture[str]) -> None:
    (diagnose,) = recipe["diagnose"]
    assert cli.main(diagnose) == 0, capsys.readouterr().err
    assert Path("report.html").exists()
