"""Something of ours in the place of something of torch's: put there, taken away, and counted.

Whatever mpcompile replaces goes through `put`. It stays for one trace, and what someone else has
put there meanwhile is left alone. Threads other than the one that traces get torch's function.

A method that is replaced where torch no longer looks is worse than one that is gone: nothing fails,
and torch goes on as before. So a `Replacement` goes to the place that this release calls from, is
refused where that has a form it doesn't know, and counts how often it was called. Whoever applies
one says by which other sign the call is known, and refuses what was traced without it.

Dynamo calls a handler by the name of its method up to torch 2.13. From 2.14 on it may look into
tables of a class instead (`tp_methods`, `tp_getset`, `tp_members`), and then never at the method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .names import compile_lock
from .private_names import MissingInTorch

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]
Undo = Callable[[], None]
Place = Callable[[Wrap], Undo]
"""Puts `wrap(theirs)` where torch's function is; returns what puts that one back."""

_NOTHING = object()

_METHODS, _ATTRIBUTES = ("tp_methods",), ("tp_getset", "tp_members")
_FIELDS = {"tp_methods": "handler", "tp_getset": "getter", "tp_members": "getter"}
_GETATTR = ("tp_getattro_impl", "var_getattr")  # reads any attribute: from torch 2.14 on; before


class Spot(NamedTuple):
    """A name of a class, a module or a dict."""

    holder: Any
    name: Any

    def held(self) -> Any:
        """What the holder itself has under this name."""
        held = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        return held.get(self.name, _NOTHING)

    def hold(self, value: Any) -> None:
        """Put a value there; none, if it was read from a holder that had none."""
        holder, name = self
        if isinstance(holder, dict):
            holder[name] = value
            if value is _NOTHING:
                del holder[name]
        elif value is _NOTHING:
            delattr(holder, name)
        else:
            setattr(holder, name, value)


def put(spot: Spot, value: Any) -> Undo:
    """Put a value there; returns what puts back what was there, unless another has come since."""
    before = spot.held()
    spot.hold(value)

    def undo() -> None:
        if spot.held() is value:
            spot.hold(before)

    return undo


class Replacement:
    """One function of ours in the place of one of torch's.

    Args:
        find: looks for the place when the replacement is applied.
        ours: what is called instead; its first argument is torch's function.

    Attributes:
        reached: how often torch has called it since it was last put there.
    """

    def __init__(self, find: Callable[[], Place], ours: Function) -> None:
        self._find, self._ours = find, ours
        self._undo: Undo | None = None
        self._thread: int | None = None  # in which it is there
        self.reached = 0

    @property
    def is_applied(self) -> bool:
        """Whether it is there now."""
        return self._undo is not None

    def apply(self) -> None:
        """Put it there, for this thread.

        Raises:
            MissingInTorch: there is no such function in this torch, or in a form not known here.
        """
        assert self._undo is None
        self._undo = self._find()(self._counted)
        self._thread, self.reached = threading.get_ident(), 0

    def revert(self) -> None:
        """Put torch's function back."""
        assert self._undo is not None
        self._undo()
        self._undo = self._thread = None

    def _counted(self, theirs: Function) -> Function:
        @functools.wraps(theirs)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return theirs(*args, **kwargs)
            self.reached += 1
            return self._ours(theirs, *args, **kwargs)

        return call


@contextlib.contextmanager
def applied(*replacements: Replacement) -> Iterator[None]:
    """In this context they are there, and no other thread compiles. One that is there already, by a
    function that is called in another one, stays.

    Raises:
        MissingInTorch: one can't be applied. Then none is.
    """
    with compile_lock, contextlib.ExitStack() as undo:
        for replacement in replacements:
            if not replacement.is_applied:
                replacement.apply()
                undo.callback(replacement.revert)
        yield


def method(cls: Any, name: str, ours: Function) -> Replacement:
    """In place of a method that torch calls by its name: `ours(theirs, self, *args)`."""
    return Replacement(lambda: _attribute(cls, name), ours)


def calls_of(cls: Any, name: str, ours: Function) -> Replacement:
    """In place of how Dynamo traces the call of a method: `ours(theirs, variable, tx, *args)`.

    Args:
        cls: Dynamo's class of variables.
        name: of the method in the traced program, such as `"backward"`.
        ours: returns a variable of Dynamo's.
    """
    return Replacement(
        lambda: _entry(cls, name, _METHODS) or _attribute(cls, f"method_{name}"), ours
    )


def reads_of(cls: Any, name: str, ours: Function) -> Replacement:
    """In place of how Dynamo traces the reading of an attribute: `ours(theirs, variable, tx)`.

    Args:
        cls: Dynamo's class of variables.
        name: of the attribute in the traced program, such as `"grad"`.
        ours: returns a variable of Dynamo's; None leaves it to the class above `cls`.
    """
    return Replacement(
        lambda: _entry(cls, name, _ATTRIBUTES) or _reading(cls, name) or _new_entry(cls, name), ours
    )


def _attribute(cls: Any, name: str) -> Place:
    if name not in vars(cls):
        raise _unknown(cls, name, "is not there")
    spot = Spot(cls, name)
    return lambda wrap: put(spot, wrap(spot.held()))


def _entry(cls: Any, name: str, tables: tuple[str, ...]) -> Place | None:
    """An entry of a table of the class itself; None if no table holds the name."""
    holders = [(c, t) for c in _related(cls) for t in tables if name in vars(c).get(t, ())]
    if not holders:
        return None
    if len(holders) > 1 or holders[0][0] is not cls:
        raise _unknown(cls, name, f"is held by {holders[-1][0].__name__}.{holders[-1][1]}")
    kind = holders[0][1]
    table, field = vars(cls)[kind], _FIELDS[kind]
    known = dataclasses.is_dataclass(table[name]) and callable(getattr(table[name], field, None))
    if not known:
        raise _unknown(cls, name, f"has a new form in {kind}")

    def place(wrap: Wrap) -> Undo:
        ours = {field: wrap(getattr(table[name], field))}
        return put(Spot(table, name), dataclasses.replace(table[name], **ours))

    return place


def _new_entry(cls: Any, name: str) -> Place:
    """An entry that the table of the class lacks."""
    table = vars(cls).get(_ATTRIBUTES[0], {})
    kinds = {type(entry) for entry in table.values()}
    if len(kinds) != 1:
        raise _unknown(cls, name, "is read in a new way")
    return lambda wrap: put(Spot(table, name), kinds.pop()(wrap(lambda variable, tx: None)))


def _reading(cls: Any, name: str) -> Place | None:
    """One attribute of all that a method reads; None if the class has no such method."""
    reader = next((r for r in _GETATTR if r in vars(cls)), None)
    if reader is None:
        return None

    def place(wrap: Wrap) -> Undo:
        def wrap_all(theirs: Function) -> Function:
            ours = wrap(lambda variable, tx: theirs(variable, tx, name))

            @functools.wraps(theirs)
            def read(variable: Any, tx: Any, asked: str) -> Any:
                if asked != name:
                    return theirs(variable, tx, asked)
                found = ours(variable, tx)
                return getattr(super(cls, variable), reader)(tx, name) if found is None else found

            return read

        return _attribute(cls, reader)(wrap_all)

    return place


def _related(cls: Any) -> Iterator[Any]:
    """The class, those above it and those below it: Dynamo looks through all of a variable's."""
    yield from cls.__mro__
    below = list(cls.__subclasses__())
    while below:
        one = below.pop()
        yield one
        below += one.__subclasses__()


def _unknown(cls: Any, name: str, why: str) -> MissingInTorch:
    return MissingInTorch(f"torch {torch.__version__}: {cls.__name__}.{name} {why}")
