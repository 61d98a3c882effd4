"""Private names of torch: one that is gone raises by its name when it is used, and not before.
What is put in the place of a method of torch's stands where the release calls it.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from repository import ROOT

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
    subprocess.run([sys.executable, "-c", WITHOUT_ANY], cwd=ROOT, check=True, timeout=300)


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
