"""Plans read back from plain data: the inverse of `to_dict()`.

What the data must look like follows from the fields of the dataclasses and their types. A key that
is no field is ignored: `to_dict()` adds totals, and a newer mpcompile may write more than this one
knows. A field that has a default may be missing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import torch

from .._version import __version__
from ..errors import MPCompileError

T = TypeVar("T")


def restored(kind: type[T], data: Any) -> T:
    """The dataclass `kind` from what its `to_dict()` returned, before or after JSON.

    Raises:
        MPCompileError: the data is not that of such an object; the message names the place.
    """
    try:
        return typing.cast(T, _dataclass(kind, data, kind.__name__))
    except _Unreadable as error:
        raise MPCompileError(f"this is not the data of a {kind.__name__}: {error}") from None


def read(path: str | Path) -> Any:
    """The plain data in a JSON file.

    Raises:
        MPCompileError: the file can't be read, or it is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MPCompileError(f"{path} can't be read: {error.strerror or error}") from None
    except ValueError as error:  # bytes that are no UTF-8, or text that is no JSON
        raise MPCompileError(f"{path} is not a plan: not JSON: {error}") from None


def write(data: Any, path: str | Path) -> None:
    """Write plain data as JSON.

    Raises:
        MPCompileError: the file can't be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise MPCompileError(f"{path} can't be written: {error.strerror or error}") from None


def written_by(data: Any) -> str:
    """`" (it was written by mpcompile 0.2.0, and this is 0.1.0)"`, or "" if it is this version."""
    versions = data.get("versions") if isinstance(data, dict) else None
    version = versions.get("mpcompile") if isinstance(versions, dict) else None
    if version in (None, __version__):
        return ""
    return f" (it was written by mpcompile {version}, and this is {__version__})"


class _Unreadable(Exception):
    """What is wrong with the data, and where."""


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    """(name, type, whether it must be given) of each field."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return tuple(
        (f.name, hints[f.name], f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(kind)
    )


def _dataclass(kind: type, data: Any, place: str) -> Any:
    if not isinstance(data, dict):
        raise _Unreadable(f"{place} is {_short(data)}, not of type dict")
    values = {}
    for name, hint, needed in _fields(kind):
        if name in data:
            values[name] = _value(hint, data[name], f"{place}.{name}")
        elif needed:
            raise _Unreadable(f"{place} has no {name!r}")
    return kind(**values)


def _value(hint: Any, data: Any, place: str) -> Any:
    if isinstance(hint, type) and not typing.get_args(hint):
        return _plain(hint, data, place)
    of: Any = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if of is types.UnionType:
        return _either(inner, data, place)
    if of is dict and isinstance(data, dict):
        return {key: _value(inner[1], value, f"{place}.{key}") for key, value in data.items()}
    if of is tuple and isinstance(data, (list, tuple)):
        hints = inner[:1] * len(data) if inner[-1] is Ellipsis else inner
        if len(hints) == len(data):
            pairs = enumerate(zip(hints, data, strict=True))
            return tuple(_value(each, value, f"{place}[{i}]") for i, (each, value) in pairs)
    raise _Unreadable(f"{place} is {_short(data)}, not of type {of.__name__}")


def _either(hints: tuple[Any, ...], data: Any, place: str) -> Any:
    """A value of one of several types; at most one of them is no plain type."""
    if type(data) in hints:
        return data
    return _value(next(hint for hint in hints if hint is not type(None)), data, place)


def _plain(hint: type, data: Any, place: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, data, place)
    if hint is torch.dtype:
        data = getattr(torch, data, data) if isinstance(data, str) else data
    elif hint is Path and isinstance(data, str):
        return Path(data)
    elif hint is float and type(data) is int:
        return float(data)
    if type(data) is not hint:
        raise _Unreadable(f"{place} is {_short(data)}, not of type {hint.__name__}")
    return data


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 40 else f"{text[:37]}..."
