"""The documents: links, anchors, paths and commands exist, and their code runs."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpcompile
from mpcompile import compiled_plans
from mpcompile.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
README, USAGE, PLANS = ROOT / "README.md", ROOT / "docs" / "usage.md", ROOT / "docs" / "plans.md"
DEBUGGING = ROOT / "docs" / "debugging.md"
DOCUMENTS = (
    README,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "SUPPORT.md",
    *(ROOT / "docs").rglob("*.md"),
)
CODE_FOLDERS = ("mpcompile", "passes", "benchmarks", "examples", "tests", "docs")
EXAMPLES = {"nets.py", "model.py"}  # files of the reader's

every_document = pytest.mark.parametrize(
    "document", sorted(DOCUMENTS), ids=lambda path: str(path.relative_to(ROOT))
)


COMMAND = r"^(?: *- run: )?mpcompile ([a-z]+)\b([^#\n]*)"
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def prose(document: Path) -> str:
    """The text without its fenced blocks."""
    return FENCED.sub("", document.read_text())


def fenced(document: Path) -> str:
    """The fenced blocks alone."""
    return "\n".join(FENCED.findall(document.read_text()))


def blocks(document: Path) -> list[str]:
    """The fenced blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.M | re.S)


@functools.cache
def anchors(document: Path) -> frozenset[str]:
    """What GitHub makes of the headings: lower case, no punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ +(.+)$", prose(document), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 200


def test_the_readme_says_first_what_is_not_measured() -> None:
    """To be taken out on the day that a time on a GPU is in benchmarks/results."""
    first = README.read_text().split("\n\n")[1]
    assert first.startswith("**Not yet measured on a GPU.**")


# -- links and paths -------------------------------------------------------------------------------


@every_document
def test_links_resolve(document: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", prose(document)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@every_document
def test_paths_exist(document: Path) -> None:
    """Those that start with a folder of ours, also in diagrams, and files in backticks."""
    text = document.read_text()
    for path in re.findall(rf"(?<![\w./-])((?:{'|'.join(CODE_FOLDERS)})/[\w./-]*)", text):
        assert (ROOT / path.rstrip(".")).exists(), path
    for file in re.findall(r"`([\w./-]+\.py)`", prose(document)):
        assert file in EXAMPLES or (ROOT / file).exists(), file


def test_anchors_are_github_s() -> None:
    assert "what-dtypeauto-does" in anchors(USAGE)
    assert "a-plan-for-a-gpu-that-you-dont-have" in anchors(PLANS)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{document.name}: make {target}"
    readme = set(re.findall(r"^make (\w+)", README.read_text(), re.M))
    assert {"demo", "test", "check", "bench"} <= readme


def test_commands_and_their_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of fenced blocks, with their flags, and names in text."""
    shown: set[tuple[str, str]] = set()
    for document in DOCUMENTS:
        shown.update(re.findall(COMMAND, fenced(document), re.M))
        shown.update((name, "") for name in re.findall(r"`mpcompile ([a-z]+)`", prose(document)))
    commands = {"info", "demo", "profile", "plan", "explain", "diagnose"}
    assert {command for command, _ in shown} == commands
    for command, arguments in sorted(shown):
        with pytest.raises(SystemExit) as done:
            main([command, "--help"])
        assert done.value.code == 0
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert set(re.findall(r"--[a-z-]+", arguments)) <= known


def test_markers_and_variables_exist() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        markers = tomllib.load(file)["tool"]["pytest"]["ini_options"]["markers"]
    ours = [path.read_text() for path in (ROOT / "mpcompile").rglob("*.py")]
    for document in DOCUMENTS:
        text = document.read_text()
        for marker in re.findall(r"(?:pytest|\") ?-m (\w+)", text):
            assert any(line.startswith(f"{marker}:") for line in markers), marker
        for variable in re.findall(r"\bMPCOMPILE_\w+", text):
            assert any(f'"{variable}"' in source for source in ours), variable


# -- code ------------------------------------------------------------------------------------------


def imports(block: str) -> Iterator[tuple[str, str | None]]:
    """`(module, name)` of everything that a block imports; no name for `import module`."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)


@every_document
def test_code_parses_and_imports_what_exists(document: Path) -> None:
    for block in blocks(document):
        for module, name in imports(block):
            found = importlib.import_module(module)
            if name is not None:
                assert hasattr(found, name), f"{module}.{name}"
            if module == "mpcompile" and name is not None:
                assert name in mpcompile.__all__


def test_the_option_table_has_every_option() -> None:
    table = README.read_text().partition("## Options")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.M)
    parameters = inspect.signature(mpcompile.mpcompile).parameters.values()
    assert rows == [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def run(documented: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """Run blocks one after the other over the same names, and return these."""
    for number, block in enumerate(documented):
        exec(compile(block, f"block {number}", "exec"), names)
    return names


def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its blocks as they stand, in their order, from an empty namespace, through Inductor."""
    quick_start = README.read_text().partition("## Quick start")[2].partition("\n## ")[0]
    assert quick_start.count("```python") == 3
    assert "mpcompile(model)" in quick_start
    assert 'backend="mpcompile"' in quick_start
    shown = blocks(README)
    assert len(shown) >= 4
    names = run(shown, {"__name__": "readme"})

    model, loss = names["model"], names["loss"]
    assert torch.isfinite(loss)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    (plan,) = compiled_plans(model)
    linears = [node.precision for node in plan.nodes if node.op == "aten::linear"]
    assert linears == ["LOW", "LOW"]
    printed = capsys.readouterr().out
    assert str(plan) in printed

    before = [p.detach().clone() for p in model.parameters()]
    model(names["x"]).square().mean().backward()
    names["optimizer"].step()  # that of the block on MPOptimizer
    assert not names["optimizer"].skipped
    assert names["optimizer"].grad_norm > 0
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, parameter)

    names["other"](names["x"]).sum().backward()
    assert {p.grad.dtype for p in names["other"].parameters()} == {torch.float32}


@torch.library.custom_op("mylib::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    """What the documents call a custom operator."""
    return x.clone()


@torch.library.custom_op("mylib::fast_norm", mutates_args=())
def fast_norm(x: torch.Tensor) -> torch.Tensor:
    """Another one."""
    return x.clone()


class Net(nn.Module):
    """What the documents' pages call `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.relu(self.up(x)))


@pytest.mark.filterwarnings("ignore:.* was compiled but never called")  # blocks leave that out
@pytest.mark.parametrize("document", [USAGE, PLANS, DEBUGGING], ids=lambda path: path.name)
def test_a_page_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that take up a model which has run forward and backward once."""
    monkeypatch.chdir(tmp_path)
    model, x = mpcompile.mpcompile(Net(), emit="eager"), torch.randn(4, 16)
    model(x).sum().backward()
    shown = blocks(document)
    assert shown
    run(shown, {"torch": torch, "model": model, "x": x, "lr": 0.1})
