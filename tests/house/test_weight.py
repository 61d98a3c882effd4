"""What the house weighs may only fall: who wants to carry it on must hold it in mind.

Each number is what there is today. Who makes one smaller writes the smaller one here; who needs
more room takes it from somewhere else.
"""

import ast
import io
import tokenize
from collections.abc import Iterator

from repository import ROOT, imported, sources, unit_of

LIMITS = {
    "lines of source": 39829,
    "lines of code": 24793,
    "files of source": 250,
    "lines of tests": 59414,
    "lines of benchmarks": 13999,
    "words of docs": 32000,
    "warnings that count more than two frames": 0,
    "registries of modules": 25,
    "arrows between the nine parts": 24,
}
# settings, errors, logs, devices, torch_inside, operators, verify, stored, steps and demo are none.
PARTS = (
    "api cli integrations", "compiler capture", "ir rules planner profile padding passes", "lower",
    "runtime", "scaling", "optim whole_step", "ranks", "observe diagnosis plans preview",
)  # fmt: skip
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
_CHANGES = {
    "Counter", "ExitStack", "WeakIdKeyDictionary", "WeakKeyDictionary", "WeakSet",
    "WeakValueDictionary", "count", "defaultdict", "deque", "dict", "list", "local", "set",
}  # fmt: skip


def _lines_of_code(text: str) -> int:
    """How many lines hold more than blanks, comments and docstrings."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def _registries(tree: ast.Module) -> Iterator[str]:
    """Names of a module, in small letters, of something that is made empty to be filled."""
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        value, target = node.value, node.targets[0] if isinstance(node, ast.Assign) else node.target
        made = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        empty = isinstance(value, (ast.Dict, ast.List)) and not ast.unparse(value)[1:-1]
        small = isinstance(target, ast.Name) and target.id == target.id.lower()
        if small and (empty or made in _CHANGES):
            yield ast.unparse(target)


def _arrows() -> set[tuple[str, str]]:
    """The parts that import something of another part, with that one."""
    part = {room: rooms for rooms in PARTS for room in rooms.split()}
    found = {(unit_of(p), target.split(".")[0]) for p in sources() for target in imported(p)}
    arrows = {(part[a], part[b]) for a, b in found if part.keys() >= {a, b}}
    return {(a, b) for a, b in arrows if a != b}


def _counted_frames(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "stacklevel":
            yield node.value.value if isinstance(node.value, ast.Constant) else 3


def _weight() -> dict[str, int]:
    texts = [path.read_text() for path in sources()]
    trees = [ast.parse(text) for text in texts]
    return {
        "lines of source": sum(text.count("\n") for text in texts),
        "lines of code": sum(map(_lines_of_code, texts)),
        "files of source": len(texts),
        "lines of tests": sum(p.read_text().count("\n") for p in (ROOT / "tests").rglob("*.py")),
        "lines of benchmarks": sum(
            p.read_text().count("\n") for p in (ROOT / "benchmarks").rglob("*.py")
        ),
        "words of docs": sum(len(p.read_text().split()) for p in (ROOT / "docs").rglob("*.md")),
        "warnings that count more than two frames": sum(
            level > 2 for tree in trees for level in _counted_frames(tree)
        ),
        "registries of modules": sum(1 for tree in trees for _ in _registries(tree)),
        "arrows between the nine parts": len(_arrows()),
    }


def test_it_only_falls() -> None:
    grown = {k: n for k, n in _weight().items() if n > LIMITS[k]}
    assert grown == {}


def test_a_step_calls_no_model() -> None:
    assert ("optim whole_step", "runtime") not in _arrows()
