"""The error types: one family for users, and one signal from passes to the backend.

`MPCompileError` is what a user sees. Its message says what was asked, where, why it can't be done,
and what to do. `CannotRewrite` never reaches a user: the backend catches it in one place and either
compiles the graph unchanged with one warning or, under `strict=True`, raises `MPCompileError`.
`MissingInTorch` (`torch_inside/private_names.py`) is both: a reason where there is a way without,
or else an error.
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Sequence


class MPCompileError(ValueError):
    """A request that can't be carried out; the message says what to do instead."""


class MPCompileWarning(UserWarning):
    """Something the user should know: a graph left in FP32, a loss scale at its floor."""


def warn(text: str) -> None:
    """Give an `MPCompileWarning` at the line of the user's program that has led here: the innermost
    that is neither ours nor torch's, a trainer's or of Python's own library.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_no_users(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    known = frame.f_globals
    registry = known.setdefault("__warningregistry__", {})  # so `warnings.warn` does it
    file, line = frame.f_code.co_filename, frame.f_lineno or 0
    warnings.warn_explicit(text, MPCompileWarning, file, line, known.get("__name__"), registry)


def _is_no_users(module: str) -> bool:
    """Also of a module without a name: of code that torch has made."""
    top = module.partition(".")[0]
    return top in _OTHERS or top in sys.stdlib_module_names


_OTHERS = {
    "", "mpcompile", "torch", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning",
    "transformers",
}  # fmt: skip


class CannotRewrite(Exception):
    """This graph can't be rewritten safely; the argument is the reason, in one sentence."""


def in_one_line(error: BaseException) -> str:
    """`"ValueError: the batch is empty"`: an error's type and the first line that it says; of a C++
    compiler that failed, what it said: `"... C++ compile error (Python.h: No such file)"`.
    """
    text = str(error).strip() or "no message"
    compiler = re.search(r": (?:fatal )?error: (.+)$", text, re.MULTILINE)
    more = f" ({compiler[1].strip()})" if compiler and "\n" in text[: compiler.start()] else ""
    return f"{type(error).__name__}: {text.splitlines()[0]}{more}"


def kind_of(value: object) -> str:
    """What someone handed over, for an error: `"Tensor"`, `"None"`, or `"class Net"`."""
    if value is None:
        return "None"
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__


def shortened(names: Sequence[str], most: int = 4) -> str:
    """`"a, b, c, d and 3 more"`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: `"; did you mean 'softmax'?"`, or the empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
