"""The documents: links, anchors, paths, commands and names exist, and the reference names
everything public. That their code runs is tested in `test_docs_code.py`.
"""

import ast
import importlib
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import COMMAND, DOCUMENTS, README, anchors, blocks, fenced, prose
from repository import ROOT

import mpcompile
import mpcompile.diagnosis
import mpcompile.plans
from mpcompile.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLANNER, PLANS = ROOT / "docs" / "planner.md", ROOT / "docs" / "plans.md"
CODE_FOLDERS = ("mpcompile", "passes", "benchmarks", "examples", "tests", "docs")
EXAMPLES = {"nets.py", "model.py"}  # files of the reader's

every_document = pytest.mark.parametrize(
    "document", sorted(DOCUMENTS), ids=lambda path: str(path.relative_to(ROOT))
)


def rendered(text: str) -> Iterator[str]:
    """The lines of a page of 100 letters; a picture takes one for each 20 of its pixels."""
    for part in re.findall(r"^```.*?^```$|(?:^(?!```)[^\n]+\n)+", text, re.M | re.S):
        if picture := re.match(r"!\[.*\]\((.+)\)", part):
            points = re.findall(r'<svg.* height="([\d.]+)pt"', (ROOT / picture[1]).read_text())[0]
            yield from [part] * math.ceil(float(points) * 4 / 3 / 20)
        elif part.startswith(("```", "|")):
            yield from part.splitlines()
        else:
            yield from textwrap.wrap(re.sub(r"\]\(.*?\)", "]", part), 100)
        yield ""


def test_the_readme_says_it_at_once() -> None:
    """700 words at most; in the first 40 lines how much faster it is, a chart, and what changes."""
    text = README.read_text().partition("## Where to go next")[0]
    assert len(re.findall(r"\S*\w\S*", text)) <= 700
    top = "\n".join([*rendered(text)][:40])
    assert re.search(r"\d\.\d\dx as fast.*!\[.*```diff\n.*\n-.*\n\+.*\n```\n", top, re.S)


def test_the_readme_says_once_that_no_gpu_ran_it() -> None:
    """To be taken out on the day that a time on a GPU is in benchmarks/results."""
    section = README.read_text().partition("## What is supported")[2].partition("\n## ")[0]
    assert "it has not run on a GPU yet" in section
    assert README.read_text().count("on a GPU yet") == 1


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
    assert "what-dtypeauto-does" in anchors(PLANNER)
    assert "a-plan-for-a-gpu-that-you-dont-have" in anchors(PLANS)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{document.name}: make {target}"
    readme = set(re.findall(r"`make (\w+)`", README.read_text()))
    assert {"demo", "test", "check", "bench"} <= readme


def test_code_is_not_cut() -> None:
    """103 columns are what `site/site.css` shows at 800 pixels."""
    for document in DOCUMENTS:
        wide = [line for line in fenced(document).splitlines() if len(line) > 103]
        assert wide == [], document.name


def test_commands_and_their_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of fenced blocks, with their flags, and names in text."""
    shown: set[tuple[str, str]] = set()
    for document in DOCUMENTS:
        shown.update(re.findall(COMMAND, fenced(document), re.M))
        shown.update((name, "") for name in re.findall(r"`mpcompile ([a-z]+)`", prose(document)))
    commands = {"info", "check", "demo", "profile", "plan", "explain", "diagnose"}
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
            assert any(re.match(rf"{marker}\b", line) for line in markers), marker
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
    usage = (ROOT / "docs" / "usage.md").read_text()
    table = usage.partition("## Options")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.M)
    parameters = inspect.signature(mpcompile.mpcompile).parameters.values()
    assert rows == [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


# -- the reference ---------------------------------------------------------------------------------


API = ROOT / "docs" / "api"
SITE = ROOT / "site"
ENTRIES = sorted(
    entry
    for page in API.glob("*.md")
    for entry in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)
)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_exists_and_says_what_it_is(entry: str) -> None:
    module, _, name = entry.rpartition(".")
    if "integrations" in module:
        pytest.importorskip(
            {"huggingface": "transformers"}.get(module.split(".")[-1], module.split(".")[-1])
        )
    assert getattr(importlib.import_module(module), name).__doc__


@pytest.mark.parametrize("module", [mpcompile, mpcompile.diagnosis, mpcompile.plans])
def test_every_public_name_has_an_entry(module: object) -> None:
    package = vars(module)["__name__"]
    public = set(vars(module)["__all__"]) - {"__version__"}
    if package != "mpcompile":  # what is also imported from the top stands there
        public -= set(mpcompile.__all__)
    assert {f"{package}.{name}" for name in public} <= set(ENTRIES)


def test_the_table_of_pages_names_them_all() -> None:
    table = (API / "README.md").read_text()
    for entry in ENTRIES:
        assert f"`{entry.rpartition('.')[2]}`" in table or "integrations" in entry


def test_the_site_is_the_documents() -> None:
    """Each stands there under its own path, so that the same links hold."""
    for document in DOCUMENTS:
        assert (SITE / document.relative_to(ROOT)).resolve() == document.resolve()
    results = SITE / "benchmarks" / "results"
    assert results.resolve() == (ROOT / "benchmarks" / "results").resolve()
