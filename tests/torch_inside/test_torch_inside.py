"""Private names of torch: one that is gone raises by its name when it is used, and not before; only
`mpcompile/torch_inside/` takes any, read off the source of all rooms. What is put in the place of a
method of torch's stands where the release calls it.
"""

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from processes import python
from repository import PACKAGE, sources

from mpcompile.torch_inside.names import pytree
from mpcompile.torch_inside.private_names import GONE, MissingInTorch, Part, gone, needed_for
from mpcompile.torch_inside.replace import Replacement, calls_of, method, reads_of

pytestmark = pytest.mark.inside


@pytest.fixture
def lacking() -> Iterator[str]:
    """A name is gone: what Python says of it."""
    with needed_for(Part.SAY):
        from torch.utils._pytree import tree_that_never_was  # noqa: F401
    yield "cannot import name 'tree_that_never_was' from 'torch.utils._pytree'"
    GONE.pop()


def test_what_is_there_is_torchs_own() -> None:
    from torch.utils import _pytree as theirs

    assert pytree is theirs
    with pytest.raises(AttributeError):
        gone("name")


def test_a_name_that_is_gone_raises_when_it_is_used(lacking: str) -> None:
    assert (Part.SAY, lacking) in GONE
    absent = gone("tree")

    class Below(absent):  # type: ignore[misc, valid-type]
        def more(self) -> int:
            return 1

    for use in (
        absent, Below, lambda: absent.field, lambda: isinstance(1, absent),
        lambda: issubclass(int, absent), lambda: len(absent), lambda: [*absent],
        lambda: 1 in absent, lambda: setattr(absent, "field", 1),
    ):  # fmt: skip
        with pytest.raises(MissingInTorch, match=rf"^torch [\w.+]+ lacks what .*\({lacking}\)$"):
            use()


@pytest.mark.parametrize(
    "taken",
    [
        "from torch._never_was import name",
        "from torch.utils._pytree import never_was",
        "import torch; torch.never_was",  # as a module of a torch that is built without distributed
    ],
)
def test_a_block_ends_where_a_name_or_a_module_is_gone(taken: str) -> None:
    before, found = len(GONE), {}
    block = f"with needed_for(part):\n    {taken}\n    from os import path"
    exec(block, {"needed_for": needed_for, "part": Part.SAY}, found)
    assert "path" not in found
    ((part, why),) = GONE[before:]
    del GONE[before:]
    assert part is Part.SAY
    assert "never_was" in why


WITHOUT_ANY = """
import builtins, torch._inductor.compile_fx
theirs = builtins.__import__
def import_(name, globals=None, *rest):
    if (globals or {}).get("__name__") == "mpcompile.torch_inside.names" and name[:5] == "torch":
        raise ImportError(name)
    return theirs(name, globals, *rest)
builtins.__import__ = import_
from mpcompile import cli
from mpcompile.torch_inside.private_names import GONE
from mpcompile.torch_inside.private_names import Part
status = cli.main(["check"])
assert status == 1
assert {part for part, _ in GONE} == {*Part}
"""


def test_the_import_needs_no_name() -> None:
    python("-c", WITHOUT_ANY)


# -- replacing -------------------------------------------------------------------------------------


@dataclass
class Method:
    """An entry of `tp_methods`, as from torch 2.14 on."""

    handler: Callable[..., Any]


@dataclass
class GetSet:
    """An entry of `tp_getset`; a getter that returns None leaves it to the class above."""

    getter: Callable[..., Any]
    setter: Callable[..., Any] | None = None


def dynamos(tables: bool) -> Any:
    """A class of variables, as up to torch 2.13 or with `tables`: how it is called and read."""

    class Above:
        def var_getattr(self, tx: str, name: str) -> str:
            return f"any object's {name}"

    class Old(Above):
        def method_backward(self, tx: str, *args: Any) -> Any:
            return ("theirs", *args)

        def var_getattr(self, tx: str, name: str) -> str:
            return f"theirs: {name}"

        def call(self, name: str, *args: Any) -> Any:
            return getattr(self, f"method_{name}")("tx", *args)

        def read(self, name: str) -> Any:
            return self.var_getattr("tx", name)

    if tables:
        Old.tp_methods = {"backward": Method(Old.method_backward)}  # type: ignore[attr-defined]
        Old.tp_getset = {"groups": GetSet(lambda *_: "theirs: groups", print)}  # type: ignore[attr-defined]
        Old.tp_getattro_impl = Old.var_getattr  # type: ignore[attr-defined]
        Old.call, Old.read = _call_table, _read_table  # type: ignore[method-assign]
    return Old


def _call_table(self: Any, name: str, *args: Any) -> Any:
    return self.tp_methods[name].handler(self, "tx", *args)


def _read_table(self: Any, name: str) -> Any:
    found = self.tp_getset[name].getter(self, "tx") if name in self.tp_getset else None
    return self.tp_getattro_impl("tx", name) if found is None else found


def below(**tables: Any) -> Any:
    """A class below one with tables, with tables of its own."""
    return type("Below", (dynamos(True),), tables)


@pytest.fixture(params=[False, True], ids=["methods", "tables"])
def variables(request: pytest.FixtureRequest) -> Any:
    return dynamos(request.param)


def applied(replacement: Replacement) -> Replacement:
    replacement.apply()
    return replacement


def test_a_call_is_traced_by_ours_until_it_is_reverted(variables: Any) -> None:
    before = [dict(vars(variables)), dict(vars(variables).get("tp_methods", {}))]
    ours = applied(calls_of(variables, "backward", lambda theirs, *args: ("ours", *theirs(*args))))
    assert variables().call("backward", 1) == ("ours", "theirs", 1)
    assert ours.reached == 1
    ours.revert()
    assert variables().call("backward", 1) == ("theirs", 1)
    assert ours.reached == 1
    assert before == [dict(vars(variables)), dict(vars(variables).get("tp_methods", {}))]


@pytest.mark.parametrize("name", ["grad", "groups"])
def test_one_attribute_is_read_by_ours(variables: Any, name: str) -> None:
    ours = applied(reads_of(variables, name, lambda theirs, *args: f"ours, {theirs(*args)}"))
    assert variables().read(name) == f"ours, theirs: {name}"
    assert variables().read("shape") == "theirs: shape"
    assert ours.reached == 1
    ours.revert()
    assert variables().read(name) == f"theirs: {name}"


def test_the_setter_of_an_attribute_stays() -> None:
    variables = dynamos(True)
    applied(reads_of(variables, "groups", lambda theirs, *args: "ours"))
    assert variables.tp_getset["groups"].setter is print


def test_what_ours_leaves_is_read_as_of_the_class_above() -> None:
    variables = dynamos(False)
    applied(reads_of(variables, "groups", lambda theirs, *args: None))
    assert variables().read("groups") == "any object's groups"


def test_replacements_lie_one_on_the_other(variables: Any) -> None:
    inner = applied(reads_of(variables, "grad", lambda theirs, *args: f"inner, {theirs(*args)}"))
    outer = applied(reads_of(variables, "grad", lambda theirs, *args: f"outer, {theirs(*args)}"))
    assert variables().read("grad") == "outer, inner, theirs: grad"
    outer.revert()
    assert variables().read("grad") == "inner, theirs: grad"
    assert (inner.reached, outer.reached) == (2, 1)


def test_what_another_has_put_there_since_stays(variables: Any) -> None:
    ours = applied(method(variables, "call", lambda theirs, *args: f"ours, {theirs(*args)}"))
    wrapped = variables.call
    variables.call = lambda *args: f"another's, {wrapped(*args)}"
    assert variables().call("backward") == "another's, ours, ('theirs',)"
    ours.revert()
    assert variables().call("backward") == "another's, ('theirs',)"


def test_another_thread_calls_torchs_own(variables: Any) -> None:
    ours = applied(calls_of(variables, "backward", lambda *_: "ours"))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(variables().call, "backward").result() == ("theirs",)
    assert (variables().call("backward"), ours.reached) == ("ours", 1)


OWN = below(tp_methods={"own": Method(print)}, tp_members={"own": GetSet(print)})
OTHER = below(tp_methods={"call": print}, tp_getset={"read": print})


@pytest.mark.parametrize(
    ("replacement", "says"),
    [
        (method(pytree.TreeSpec, "gone", print), "TreeSpec.gone is not there"),
        (calls_of(dynamos(True), "gone", print), "Old.method_gone is not there"),
        (calls_of(OWN.__mro__[1], "own", print), "Old.own is held by Below.tp_methods"),
        (reads_of(OWN.__mro__[1], "own", print), "Old.own is held by Below.tp_members"),
        (calls_of(OWN, "backward", print), "Below.backward is held by Old.tp_methods"),
        (reads_of(OWN, "groups", print), "Below.groups is held by Old.tp_getset"),
        (reads_of(OWN, "grad", print), "Below.grad is read in a new way"),
        (calls_of(OTHER, "call", print), "Below.call has a new form in tp_methods"),
        (reads_of(OTHER, "read", print), "Below.read has a new form in tp_getset"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_place_that_is_not_known_is_refused(replacement: Replacement, says: str) -> None:
    with pytest.raises(MissingInTorch, match=says):
        replacement.apply()


# -- who takes them --------------------------------------------------------------------------------


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
