"""Faults for the tests to catch, drawn from the sources by a seed: so many in each room.

A fault is one small change of meaning within a function: a condition negated, a comparison turned,
`and` for `or`, a sign, a statement left out, a truth value flipped. `planting/sitecustomize.py`
makes the change while Python imports the module, so that no file is written.
"""

import ast
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
        name: what it is called, as `file:line:column:kind`.
        room: the folder, as `optim` or `passes/joint`; flat modules are in `mpcompile`.
        file: by its path from the root.
        line, column: where it begins.
        end: where it ends, line and column: a sum may begin where its first term does.
        kind: what is done, as `negated`.
        text: the source that it is done to.
    """

    name: str
    room: str
    file: str
    line: int
    column: int
    end: tuple[int, int]
    kind: str
    text: str


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
            text = file.read_text()
            for function, node, kind in _places(ast.parse(text)):
                source = " ".join((ast.get_source_segment(text, node) or "").split())
                place = node.lineno, node.col_offset
                name = f"{path}:{place[0]}:{place[1]}:{kind}"
                fault = Fault(name, room, path, *place, _end(node), kind, source[:80])
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


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _is_place(node: ast.AST, fault: Fault) -> bool:
    if not isinstance(node, (ast.expr, ast.stmt)) or fault.kind not in _kinds(node):
        return False
    place = fault.line, fault.column, tuple(fault.end)
    return (node.lineno, node.col_offset, _end(node)) == place


class _Plant(ast.NodeTransformer):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.made = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if _is_place(node, self.fault):
            self.made += 1
            return ast.copy_location(self._changed(node), node)
        return super().generic_visit(node)

    def _changed(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (ast.If, ast.IfExp)):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        elif isinstance(node, ast.Compare):
            node.ops = [_TURNED[type(node.ops[0])]()]
        elif isinstance(node, ast.BoolOp):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        elif isinstance(node, ast.BinOp):
            node.op = _SIGNS[type(node.op)]()
        elif isinstance(node, ast.Constant):
            return ast.Constant(not node.value)
        else:
            return ast.Pass()
        return node


def planted(tree: ast.Module, fault: Fault) -> ast.Module:
    """The module with the fault.

    Raises:
        LookupError: the module has no such place.
    """
    plant = _Plant(fault)
    tree = plant.visit(tree)
    if plant.made != 1:
        raise LookupError(fault.name)
    return ast.fix_missing_locations(tree)


def watched(tree: ast.Module, faults: dict[int, Fault]) -> ast.Module:
    """The module with a call of `_planting.reached(number)` before each statement that holds the
    place of a fault of that number.
    """
    for parent in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(parent, field, None)
            if not isinstance(statements, list):
                continue
            for statement in list(statements):
                numbers = [n for n, fault in faults.items() if _holds(statement, fault)]
                for number in numbers:
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


def _holds(statement: ast.stmt, fault: Fault) -> bool:
    """Whether the place is in the statement, and not within a statement inside of it."""
    if not isinstance(statement, ast.stmt):
        return False
    parts: list[ast.AST] = [statement]
    while parts:
        node = parts.pop()
        if _is_place(node, fault):
            return True
        inner = ast.iter_child_nodes(node)
        parts.extend(
            child for child in inner if not isinstance(child, (ast.stmt, ast.excepthandler))
        )
    return False
