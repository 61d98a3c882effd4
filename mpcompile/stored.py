"""Plans and profiles read back from plain data, the inverse of `to_dict()`; and files written.

What the data must look like follows from the fields of the dataclasses and their types. A key that
is no field is ignored: `to_dict()` adds totals, and a newer mpcompile may write more than this one
knows. A field that has a default may be missing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from ._version import __version__
from .errors import MPCompileError

T = TypeVar("T")


def restored(kind: type[T], data: Any) -> T:
    """The dataclass `kind` from what its `to_dict()` returned, before or after JSON.

    Raises:
        MPCompileError: the data is not that of such an object; the message names the place.
    """
    try:
        return typing.cast(T, _value(kind, data, kind.__name__))
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


def write(text: str, path: str | Path) -> None:
    """Write a file, and the directory that it is in.

    Raises:
        MPCompileError: the file can't be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MPCompileError(
            f"{path} can't be written: {error.strerror or error}; give the path of a file in a "
            "directory that you may write to"
        ) from None


def replace(text: str, path: Path) -> None:
    """Write a file, and the directory that it is in, as a whole or not at all: a reader never sees
    half of it.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mpcompile-") as folder:
        whole = Path(folder) / path.name
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, path)


def written_by(data: Any) -> str:
    """`" (it was written by mpcompile 0.2.0, and this is 0.1.0)"`, or "" if it is this version."""
    versions = data.get("versions") if isinstance(data, dict) else None
    version = versions.get("mpcompile") if isinstance(versions, dict) else None
    if version in (None, __version__):
        return ""
    return f" (it was written by mpcompile {version}, and this is {__version__})"


class _Unreadable(Exception):
    """What is wrong with the data, and where."""


def _value(hint: Any, data: Any, place: str) -> Any:
    """What the data says, as a value of the type `hint`; `place` is for messages."""
    of: Any = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    if of is types.UnionType:  # at most one of the types is no plain one
        own = next(one for one in inner if one is not types.NoneType)
        return data if type(data) in inner else _value(own, data, place)
    if of is dict and isinstance(data, dict):
        return {key: _value(inner[1], value, f"{place}.{key}") for key, value in data.items()}
    long = of is tuple and isinstance(data, (list, tuple))
    if long and (inner[-1] is Ellipsis or len(inner) == len(data)):
        return tuple(_value(inner[0], value, f"{place}[{i}]") for i, value in enumerate(data))
    is_dataclass = dataclasses.is_dataclass(of)
    if is_dataclass and isinstance(data, dict):
        return of(**dict(_fields(of, data, place)))
    if of is torch.dtype and isinstance(data, str):
        data = getattr(torch, data, data)
    elif of is Path and isinstance(data, str):
        return Path(data)
    elif of is float and type(data) is int:
        return float(data)
    if type(data) is not of:
        wanted = "dict" if is_dataclass else of.__name__
        text = repr(data)
        text = text if len(text) <= 40 else f"{text[:37]}..."
        raise _Unreadable(f"{place} is {text}, not of type {wanted}")
    return data


def _fields(kind: Any, data: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    missing = dataclasses.MISSING
    for field in dataclasses.fields(kind):
        if field.name in data:
            hint = _hints(kind)[field.name]
            yield field.name, _value(hint, data[field.name], f"{place}.{field.name}")
        elif field.default is missing and field.default_factory is missing:
            raise _Unreadable(f"{place} has no {field.name!r}")


_hints = functools.cache(typing.get_type_hints)
