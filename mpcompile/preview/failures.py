"""Describes an error in the user's code in one line, with its source line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

from ..errors import in_one_line
from ..torch_inside.names import TorchRuntimeError

__all__ = ["described", "place"]

_NOT_THEIRS = (Path(torch.__file__).parent, Path(__file__).parents[1])


def described(error: BaseException) -> str:
    """For example `"ValueError: the batch is empty (model.py:12)"`."""
    said = in_one_line(error)
    if isinstance(error, TorchRuntimeError) and (
        inner := re.search(r": got (\w+\(.*\))$", str(error).strip(), re.M)
    ):
        said = inner[1]  # the error that Dynamo got from an operator
    return said + place(error)


def place(error: BaseException) -> str:
    """`" (model.py:12)"`, the innermost of the user's lines that led to the error, or `""`."""
    stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in stack
        if not any(Path(frame.filename).is_relative_to(root) for root in _NOT_THEIRS)
        and not frame.filename.startswith("<")
    ]
    return f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
