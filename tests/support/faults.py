"""Faults for the tests to catch, drawn from the sources by a seed: so many in each room.

A fault is one small change of meaning within a function: a condition negated, a comparison turned,
`and` for `or`, a sign, a statement left out, a truth value flipped. `planting/sitecustomize.py`
makes the change while Python imports the module, so that no file is written.
"""

import ast
import copy
import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE,
    ast.GtE: ast.Lt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
# What only says something: a fault there breaks no training.
_WORDS = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
_SAYING = ("debug", "info", "warning", "warn", "print", "append_reason")


@dataclass(frozen=True)
class Fault:
    """A change of one place.

    Attributes:
        name: what it is called; of a drawn one `file:line:column:kind`.
        file: by its path from the root.
        old: the text there, and `new` what it becomes.
        at: in which byte of the file it begins; None: it stands in the file once.
        room: the folder, as `optim` or `passes/joint`; flat modules are in `mpcompile`.
        breaks: what goes wrong, in words, or "".
        caught_by: files of tests, or single tests. The default run must hold one that fails.
    """

    name: str
    file: str
    old: str
    new: str
    at: int | None = None
    room: str = ""
    breaks: str = ""
    caught_by: tuple[str, ...] = ()


def rooms() -> dict[str, list[Path]]:
    """The source files of each room."""
    found: dict[str, list[Path]] = {}
    package = _ROOT / "mpcompile"
    for file in sorted(package.rglob("*.py")):
        inner = file.relative_to(package).parts
        if inner[0] != "passes":
            found.setdefault(inner[0] if len(inner) > 1 else "mpcompile", []).append(file)
    for file in sorted((_ROOT / "passes").rglob("*.py")):
        if file.parent.name != "passes":
            found.setdefault(f"passes/{file.parent.name}", []).append(file)
    return found


def drawn(seed: int, each: int) -> list[Fault]:
    """Of each room, faults in as many different functions as it has."""
    faults = []
    for room, files in rooms().items():
        of_function: dict[tuple[str, str], list[Fault]] = {}
        for file in files:
            path = file.relative_to(_ROOT).as_posix()
            source = file.read_bytes()
            for function, node, kind in _places(ast.parse(source)):
                start, end = _span(source, node.test if kind == "negated" else node)
                old = source[start:end].decode()
                name = f"{path}:{node.lineno}:{node.col_offset}:{kind}"
                fault = Fault(name, path, old, _changed(node, old), start, room)
                of_function.setdefault((path, function), []).append(fault)
        draw = random.Random(f"{seed} {room}")  # one room's files change no other room's faults
        functions = sorted(of_function)
        chosen = draw.sample(functions, min(each, len(functions)))
        faults.extend(draw.choice(of_function[key]) for key in chosen)
    return faults


_Place = tuple[str, ast.expr | ast.stmt, str]


def _places(node: ast.AST, function: str = "", runs: bool = False) -> Iterator[_Place]:
    """Each place within a function that may get a fault: the function, the node, the kind."""
    if isinstance(node, _WORDS):
        return
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if node.name == "__repr__":
            return
        inner, function = node.body, f"{function}.{node.name}"
        runs = not isinstance(node, ast.ClassDef)  # what a class body states is made at import
    elif runs and isinstance(node, (ast.expr, ast.stmt)):
        yield from ((function, node, kind) for kind in _kinds(node))
    for child in inner:
        yield from _places(child, function, runs)


def _kinds(node: ast.expr | ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.If, ast.IfExp)) and not isinstance(
        node.test, (ast.Compare, ast.BoolOp)
    ):
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield "negated"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _TURNED:
        yield "turned"
    elif isinstance(node, ast.BoolOp):
        yield "and-or"
    elif isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        if not any(isinstance(side, (ast.JoinedStr, ast.Constant)) and _is_text(side)
                   for side in (node.left, node.right)):  # fmt: skip
            yield "sign"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "flipped"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name not in _SAYING:
            yield "left-out"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@functools.cache
def _line_starts(source: bytes) -> list[int]:
    return [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]


def _span(source: bytes, node: Any) -> tuple[int, int]:
    """Where a node begins and ends, in bytes."""
    before = _line_starts(source)
    start = before[node.lineno - 1] + node.col_offset
    return start, before[node.end_lineno - 1] + node.end_col_offset


def _changed(node: Any, old: str) -> str:
    """What takes the place of this text, of as many lines."""
    lines, node = "\n" * old.count("\n"), copy.copy(node)
    if isinstance(node, (ast.If, ast.IfExp)):
        return f"not ({old})"
    if isinstance(node, ast.Constant):
        return str(not node.value)
    if isinstance(node, ast.Expr):
        return f"pass{lines}"
    if isinstance(node, ast.Compare):
        node.ops = [_TURNED[type(node.ops[0])]()]
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    else:
        node.op = _SIGNS[type(node.op)]()
    return f"({ast.unparse(node)}{lines})"


def planted(source: bytes, fault: Fault) -> bytes:
    """The file with the fault.

    Raises:
        LookupError: the file has no such place, or several.
    """
    old, at = fault.old.encode(), fault.at
    if at is None and source.count(old) == 1:
        at = source.index(old)
    if at is None or not source.startswith(old, at):
        raise LookupError(fault.name)
    return source[:at] + fault.new.encode() + source[at + len(old) :]


def watched(source: bytes, faults: dict[int, Fault]) -> ast.Module:
    """The module with a call of `_planting.reached(number)` before each statement that holds the
    place of a fault of that number.
    """
    tree = ast.parse(source)
    for number, fault in faults.items():
        lists = [
            statements
            for parent in ast.walk(tree)
            for field in ("body", "orelse", "finalbody")
            if isinstance(statements := getattr(parent, field, None), list)
        ]
        # The last one that holds it is the innermost: ast.walk goes from the outside in.
        statements, statement = [
            (statements, statement)
            for statements in lists
            for statement in statements
            if _holds(source, statement, fault)
        ][-1]
        call = ast.parse(f"_planting.reached({number})").body[0]
        for node in ast.walk(call):
            ast.copy_location(node, statement)
        statements.insert(statements.index(statement), call)
    first = next(
        i for i, s in enumerate(tree.body)
        if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        and not (isinstance(s, ast.ImportFrom) and s.module == "__future__")
    )  # fmt: skip
    tree.body.insert(first, ast.parse("import sitecustomize as _planting").body[0])
    return ast.fix_missing_locations(tree)


def _holds(source: bytes, statement: ast.stmt, fault: Fault) -> bool:
    start, end = _span(source, statement)
    return fault.at is not None and start <= fault.at < end
