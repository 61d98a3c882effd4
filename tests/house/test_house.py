"""The plan of the house: the size of files and functions, and that nothing is said twice. The
planted defects of `tests/support/mutants.py` fit the sources; a run of them is no test.
"""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from faults import Fault, planted
from mutants import MUTANTS
from operators_page import page
from repository import ROOT

from mpcompile.rules.op_names import op_key
from mpcompile.rules.table import TABLE

PACKAGES = ("mpcompile", "passes", "benchmarks")
SAYS = ("MPCompileError", "CannotRewrite", "warn", "self._warn_once")
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_REPEAT = 400, 60, 5


def sources(*packages: str) -> list[Path]:
    found = [p for package in packages for p in (ROOT / package).rglob("*.py")]
    return sorted(p for p in found if not p.is_relative_to(ROOT / "mpcompile" / "passes"))


def test_files_are_short() -> None:
    lengths = {named(p): p.read_text().count("\n") for p in sources(*PACKAGES, "tests")}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


def test_messages_are_short() -> None:
    """40 words at most, where a part that is filled in counts as one."""
    for path in sources("mpcompile"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in SAYS:
                for said in node.args:
                    words = re.sub(r"\{[^{}]*\}", "X", ast.unparse(said)).split()
                    assert len(words) <= 40, f"{named(path)}: {node.lineno}"


@pytest.mark.slow("reads the whole tree")
def test_functions_are_short() -> None:
    long = {}
    for path in sources(*PACKAGES, "tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long[f"{named(path)}: {node.name}"] = length
    assert long == {}


# Where anything may be caught, how often, and why nothing narrower will do.
BROAD = {
    "mpcompile/compiler/backend.py": (2, "a graph that can't be rewritten stays in FP32"),
    "mpcompile/runtime/check_module.py": (1, "a user's model may fail to copy by anything"),
    "mpcompile/cli/machine.py": (1, "a compiler, or another torch, may raise anything"),
    "mpcompile/torch_inside/tracing_settings.py": (1, "Inductor may fail by anything there"),
    "mpcompile/optim/trace.py": (1, "a user's optimizer may fail to trace by anything"),
    "mpcompile/preview/explain.py": (1, "a user's model may raise anything"),
    "mpcompile/preview/factory.py": (2, "a user's file and factory may raise anything"),
    "mpcompile/compiler/repair.py": (1, "training goes on where it can't be repaired"),
    "mpcompile/verify/first_call.py": (2, "where verification fails, the training goes on"),
    "mpcompile/verify/verdicts.py": (1, "a program for a report may fail to print by anything"),
    "mpcompile/whole_step/train_step.py": (1, "a step that can't be one graph runs in pieces"),
}


@pytest.mark.slow("reads the whole tree")
def test_nobody_else_catches_everything() -> None:
    found: Counter[str] = Counter()
    for path in sources("mpcompile", "passes"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) or (
                isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")
            ):
                caught = [node.type] if isinstance(node, ast.ExceptHandler) else node.args
                names = {name for one in caught for name in _names(one)}
                found[named(path)] += bool(names & {"Exception", "BaseException"})
    assert {name: n for name, n in found.items() if n} == {
        name: n for name, (n, _) in BROAD.items()
    }


def _names(caught: ast.expr | None) -> set[str]:
    """The names in what a handler catches; all there is if it says nothing."""
    if caught is None:
        return {"BaseException"}
    return {node.id for node in ast.walk(caught) if isinstance(node, ast.Name)}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_nothing_stands_twice() -> None:
    """No run of six lines in two places; imports, comments and lone brackets don't count."""
    seen: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in sources(*PACKAGES):
        lines = _lines_that_count(path)
        for i in range(len(lines) - LONGEST_REPEAT):
            block = lines[i : i + LONGEST_REPEAT + 1]
            place = f"{path.relative_to(ROOT)}:{block[0][0]}"
            seen[tuple(text for _, text in block)].append(place)
    assert [places for places in seen.values() if len(places) > 1] == []


def _lines_that_count(path: Path) -> list[tuple[int, str]]:
    text = path.read_text()
    imports = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for number in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        counts = word and not word.startswith("#") and re.search(r"\w", word)
        if counts and number not in imports:
            found.append((number, word))
    return found


# -- one table of operators -----------------------------------------------------------------------

# Other vocabularies than the table's, which is pre-dispatch ATen.
OTHER_VOCABULARIES = {
    "passes/joint": "AOTAutograd's joint graph, after Inductor's decompositions",
    "mpcompile/optim": "a traced optimizer step, functional",
    "mpcompile/lower/inference.py": "the same, and whole training steps",
    "mpcompile/planner/partitioned.py": "the forward graph that AOTAutograd parts from the joint",
}


def test_nobody_else_names_operators_in_a_set() -> None:
    """What is known about operators stands on their rows: no collection of operators elsewhere."""
    found = []
    for path in sources("mpcompile", "passes"):
        if named(path).startswith("mpcompile/rules/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Set, ast.List, ast.Tuple, ast.Dict)):
                members = node.keys if isinstance(node, ast.Dict) else node.elts
                operators = [ast.unparse(m) for m in members if m is not None and _is_operator(m)]
                if len(operators) > 1:
                    found.append(f"{named(path)}:{node.lineno} names {', '.join(operators)}")
    others = tuple(OTHER_VOCABULARIES)
    assert [line for line in found if not line.startswith(others)] == []
    assert any(line.startswith(others) for line in found), "it would see one"


def _is_operator(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return "::" in node.value and op_key(node.value) in TABLE
    return bool(re.match(r"(torch\.ops\.)?aten\.\w+", ast.unparse(node)))


def test_the_page_of_operators_is_the_table() -> None:
    """Made by `python tests/support/operators_page.py > docs/operators.md`."""
    assert (ROOT / "docs" / "operators.md").read_text() == page()


# -- planted defects -------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_can_be_planted(mutant: Fault) -> None:
    source = (ROOT / mutant.file).read_bytes()
    compile(planted(source, mutant), mutant.file, "exec")
    for path in mutant.caught_by:
        file, _, test = path.partition("::")
        assert f"def {test}" in (ROOT / file).read_text()


def test_there_are_twenty_with_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
