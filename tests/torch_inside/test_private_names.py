"""Only `mpcompile/torch_inside/` takes private names of torch: read off the source of all rooms."""

import ast
import functools
from collections import Counter
from collections.abc import Iterator

import pytest
from repository import PACKAGE, sources

pytestmark = pytest.mark.inside

ROOM = PACKAGE / "torch_inside"
# Attributes of torch's objects that something of ours is called, too.
TORCHS = {"_base", "_buffers", "_enabled", "_modules", "_parameters", "_values", "_version"}
# Private names of other libraries, and one of ours on an object of torch's.
OTHERS = {"_getframe", "_load_scaler", "_mpcompile_version", "_save_scaler", "_trainer"}
# Operators are private in name only: ATen's schema says what they do.
OPERATORS = ("torch.ops.", "aten.", "functional.")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def taken(tree: ast.AST, ours: frozenset[str]) -> Iterator[str]:
    """The private names of torch that a file takes: imports, paths, attributes of objects.

    `ours`: the private names that mpcompile gives to what is its own.
    """
    imports = list(imported(tree))
    names = dict(imports)
    yield from (path for _, path in imports if is_torchs(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if (base := names.get(dotted(node).partition(".")[0])) is not None:
                path = f"{base}.{dotted(node).partition('.')[2]}"
                if is_torchs(path):
                    yield path
            elif is_foreign(node.attr, ours) and not dotted(node).startswith(
                ("self.", "cls.", *OPERATORS)
            ):
                yield node.attr
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_foreign(str(name.value), ours):
                yield str(name.value)


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a file imports: the name that it has there, and its dotted path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)
        elif isinstance(node, ast.Import):
            for a in node.names:
                yield a.asname or a.name.partition(".")[0], a.name
                if a.asname is None:
                    yield a.name.partition(".")[0], a.name.partition(".")[0]


def dotted(node: ast.expr) -> str:
    """`a.b.c` of such an expression; of a path from anything else, `?.b.c`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def is_torchs(path: str) -> bool:
    private = path.startswith("torch.") and any(map(is_private, path.split(".")))
    return private and not path.startswith(OPERATORS)


def is_foreign(name: str, ours: frozenset[str]) -> bool:
    return is_private(name) and (name in TORCHS or name not in ours | OTHERS)


@functools.cache
def own_names() -> frozenset[str]:
    """Private names of functions, classes, attributes and fields of ours."""
    found: set[str] = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and dotted(node) == f"self.{node.attr}"
            ):
                found.add(node.attr)
    return frozenset(filter(is_private, found))


@pytest.mark.slow("compiles by Inductor, or in processes of their own")
def test_only_the_room_takes_private_names() -> None:
    found = {path: [*taken(ast.parse(path.read_text()), own_names())] for path in sources()}
    outside = {path: names for path, names in found.items() if names and ROOM not in path.parents}
    assert outside == {}
    assert any(found.values()), "it sees those that the room takes"


def test_the_room_takes_no_name_twice() -> None:
    trees = (ast.parse(path.read_text()) for path in ROOM.glob("*.py"))
    paths = Counter(path for tree in trees for _, path in imported(tree) if is_torchs(path))
    assert {path for path, count in paths.items() if count > 1} == set()
