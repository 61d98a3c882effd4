"""Every block of Python in every document runs; one that can't says so on its page.

The blocks of a page are pasted one after the other into an empty file, which is run in a folder of
its own, through Inductor. The recipe of docs/ci.md is run as it stands.
"""

import csv
import json
import logging
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import COMMAND, DOCUMENTS, README, blocks, fenced
from repository import ROOT

from mpcompile import cli, compiled_plans
from mpcompile.devices.registry import capabilities

NOT_RUN = re.compile(r"^\*Not run by the tests: [^*]+\*\n\n(```python\n.*?^```$)", re.M | re.S)
ELSEWHERE = {README, ROOT / "docs" / "ci.md"}  # below


def runnable(document: Path) -> list[str]:
    """The blocks that are not marked as not run."""
    marked = "".join(NOT_RUN.findall(document.read_text()))
    return [block for block in blocks(document) if block not in marked]


PAGES = sorted(page for page in DOCUMENTS if blocks(page) and page not in ELSEWHERE)


def ran(document: Path, folder: Path) -> dict[str, Any]:
    """What is defined when a page's program has run."""
    (folder / "train.py").write_text("\n".join(runnable(document)))
    return runpy.run_path(str(folder / "train.py"), run_name="__main__")


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Handlers that a block sets are taken away again, and so is a process group."""
    logger = logging.getLogger("mpcompile")
    before, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = before
    logger.setLevel(level)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.slow_rows("runs what the documents show")
@pytest.mark.filterwarnings("ignore:.* was compiled but never called")  # blocks leave that out
@pytest.mark.filterwarnings("ignore:::lightning")
@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ran(document, tmp_path)
    if document.name == "trainers.md":  # its two callbacks log
        logged = [names["trainer"].state.log_history[-1]]
        logged += csv.DictReader(next(tmp_path.rglob("metrics.csv")).read_text().splitlines())
        assert [float(row["half"]) for row in logged] == [1.0] * 3


@pytest.mark.slow("runs what the documents show")
def test_the_readme_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what it says that it prints; what is measured differs from machine to machine."""
    names = ran(README, tmp_path)
    model, printed = names["model"], capsys.readouterr().out
    assert torch.isfinite(names["loss"])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not names["optimizer"].skipped
    if not capabilities("cpu").has_units(torch.bfloat16) or torch.cuda.is_available():
        pytest.skip("the README shows a plan for a CPU with BF16 instructions")
    nodes = [node for plan in compiled_plans(model) for node in plan.nodes]
    assert {node.precision for node in nodes if node.op == "aten::linear"} == {"LOW"}

    def plainly(text: str) -> str:
        return " ".join(re.sub(r"\d+\.\d+(?:e\+\d+)?", "0.0", text).split())

    for said in blocks(README, "text"):
        assert len(said.splitlines()) == 6
        for line in re.sub(r"\n {8,}", " ", said).splitlines():
            assert plainly(line) in plainly(printed), line


def test_what_is_not_run_says_so() -> None:
    text = "*Not run by the tests: it needs a Cray.*\n\n```python\n1 / 0\n```\n"
    assert NOT_RUN.search(text)
    assert not NOT_RUN.search(text.replace("Not run", "Never run"))


# -- the recipe of docs/ci.md ----------------------------------------------------------------------


CI = ROOT / "docs" / "ci.md"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """The commands of the page, by their names; the factories stand in `nets.py`."""
    (tmp_path / "nets.py").write_text("\n".join(blocks(CI)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    found: dict[str, list[list[str]]] = {}
    for name, arguments in re.findall(COMMAND, fenced(CI), re.M):
        found.setdefault(name, []).append([name, *shlex.split(arguments)])
    return found


@pytest.mark.slow("runs what the documents show")
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


@pytest.mark.slow("runs what the documents show")
def test_diagnose(recipe: dict[str, list[list[str]]], capsys: pytest.CaptureFixture[str]) -> None:
    (diagnose,) = recipe["diagnose"]
    assert cli.main(diagnose) == 0, capsys.readouterr().err
    assert Path("report.html").exists()
