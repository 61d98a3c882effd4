"""A policy as a file, to be committed beside the model: TOML, or JSON with the same keys.

    written_by = "mpcompile 0.1.0"
    full = ["aten::gelu"]

    [modules]
    "^lm_head$" = "fp32"

    [nodes]
    linear_3 = "fp32"  # amax 1.2e5 in 3 of 10 batches

Every key may be absent. The lines of `modules` keep their order: the last match wins.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .._version import __version__
from ..errors import MPCompileError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

_SETS, _TABLES = ("low", "full", "keep"), ("modules", "nodes")
_KEYS = ("written_by", *_SETS, *_TABLES)


def write(
    path: str | os.PathLike[str], entries: Mapping[str, Any], comments: Mapping[str, str]
) -> None:
    """Write the arguments of a `Policy`; `Policy.save` describes path, comments and errors.

    Args:
        path: ends in ".toml" or ".json".
        entries: "low", "full" and "keep" -> list of names; "modules" and "nodes" -> dict of words.
        comments: key of "modules" or "nodes" -> why it is there.
    """
    pins = [key for table in _TABLES for key in entries[table]]
    for key in comments:
        if key not in pins:
            raise MPCompileError(
                f"a comment on {key!r}, which is no entry{did_you_mean(key, pins)}"
            )
    written = {"written_by": f"mpcompile {__version__}", **entries}
    text = _toml(written, comments) if _is_toml(path) else json.dumps(written, indent=2) + "\n"
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise MPCompileError(
            f"{os.fspath(path)}: {error.object[error.start]!r} can't be written in TOML: save the "
            "policy as .json"
        ) from None
    except OSError as error:
        raise MPCompileError(
            f"can't write the policy file {os.fspath(path)}: {error.strerror}"
        ) from None


def read(path: str | os.PathLike[str], make: Callable[..., T]) -> T:
    """`make(low=..., modules=..., ...)` with what the file says.

    Raises:
        MPCompileError: the file can't be read, or says something that it can't mean, or `make`
            raised one; the message names the file and the key or line.
    """
    is_toml = _is_toml(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = tomllib.loads(text) if is_toml else json.loads(text, object_pairs_hook=_unique)
        _check(data)
        return make(**{key: value for key, value in data.items() if key != "written_by"})
    except OSError as error:
        raise MPCompileError(
            f"can't read the policy file {os.fspath(path)}: {error.strerror}"
        ) from None
    except ValueError as error:  # or MPCompileError, UnicodeDecodeError, one of TOML or JSON
        raise MPCompileError(f"{os.fspath(path)} holds no policy: {error}") from None


def _is_toml(path: str | os.PathLike[str]) -> bool:
    suffix = Path(path).suffix
    if suffix not in (".toml", ".json"):
        raise MPCompileError(
            f"a policy file ends in .toml or .json, and {os.fspath(path)!r} does not"
        )
    return suffix == ".toml"


def _toml(entries: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """One line for each entry of a table, with its comment."""
    import tomli_w  # only those who write TOML need it

    tables = {key: entries[key] for key in _TABLES if entries[key]}
    lines = [tomli_w.dumps({key: value for key, value in entries.items() if key not in _TABLES})]
    for name, table in tables.items():
        lines.append(f"\n[{name}]\n")
        for key, word in table.items():
            line = tomli_w.dumps({key: word})
            if key in comments:
                # a comment ends with its line, and may hold no control characters
                reason = "".join(c if c.isprintable() else " " for c in comments[key])
                line = f"{line.rstrip()}  # {reason}\n"
            lines.append(line)
    return "".join(lines)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two equal keys, Python's reader would drop one."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise MPCompileError(f"{key!r} stands there twice")
        found[key] = value
    return found


def _check(data: Any) -> None:
    """Refuse a key that nobody reads, and shapes that `Policy` would take for something else."""
    if not isinstance(data, dict):
        raise MPCompileError(f"give an object with some of the keys {', '.join(_KEYS)}")
    for key, value in data.items():
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS)
            raise MPCompileError(f"unknown key {key!r}{hint}; known: {', '.join(_KEYS)}")
        if key in _TABLES:
            if not isinstance(value, dict):
                raise MPCompileError(f"{key} = {value!r}: give a table, name -> precision")
            for name, word in value.items():
                if isinstance(word, dict):  # [modules] with the line layers.0.fc = "fp32"
                    raise MPCompileError(
                        f"{key}: {name!r} is a table, not a precision: put a name that has dots "
                        "into quotes"
                    )
        elif key in _SETS:
            if not isinstance(value, list) or not all(isinstance(op, str) for op in value):
                raise MPCompileError(f"{key} = {value!r}: give a list of operators' names")
        elif not isinstance(value, str):
            raise MPCompileError(f"{key} = {value!r}: give a text")
