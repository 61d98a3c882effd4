"""Why a graph ends where it does: Dynamo's reason for a graph break, and the user's line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx

from .names import counters

_NOT_THEIRS = (Path(torch.__file__).parent, Path(__file__).parents[1])


def why_it_ends(gm: fx.GraphModule) -> str | None:
    """One sentence on why the program broke off after a graph of Dynamo's; None if it returns.

    For example "Failed to trace builtin operator: Dynamo does not know how to trace builtin
    operator `print` (model.py:12)".
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = users_frame(reason.user_stack)
    place = f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""
    return _sentence(reason.reason) + place


def skips() -> dict[str, int]:
    """Dynamo's texts on what it did not trace so far, and how often; for `skipped_since`."""
    return dict(counters["unimplemented"])


def skipped_since(before: Mapping[str, int]) -> tuple[str, ...]:
    """The frames that Dynamo has left to Python since `skips()`, and why: for example `"forward
    (model.py:12): Data-dependent branching in a loop"`.
    """
    found: dict[str, None] = {}
    for text, count in counters["unimplemented"].items():
        frame = re.search(r"frame skipped: (\w+) \((.*) line (\d+)\)", text)
        if count > before.get(text, 0) and frame is not None:
            name, path, line = frame.groups()
            loop = ", in a loop" if "graph break in loop" in text else ""
            found[f"{name} ({Path(path).name}:{line}): {_sentence(text)}{loop}"] = None
    return tuple(found)


def _sentence(text: str) -> str:
    """Dynamo's title, and the first sentence of its explanation."""
    if text.startswith("generic_jump"):
        return "Data-dependent branching: the program branches on the value of a tensor"
    if text.startswith("step_unsupported"):
        return "Dynamo can't go on from here within one graph"
    title = text.partition("\n")[0].strip()
    explained = re.search(r"^\s*Explanation: (.*)$", text, re.M)
    first = re.split(r"\. (?=[A-Z])", explained[1])[0] if explained else ""  # "(e.g. `if ...`)"
    said = f"{title}: {first}" if first else title
    # An address would make two plans of the same model differ.
    return re.sub(r" at 0x[0-9a-f]+", "", said).rstrip(".")


def users_frame(stack: Iterable[FrameSummary]) -> FrameSummary | None:
    """The innermost of the user's frames, if there is one."""
    theirs = [
        frame
        for frame in stack
        if not any(Path(frame.filename).is_relative_to(root) for root in _NOT_THEIRS)
    ]
    return theirs[-1] if theirs else None
