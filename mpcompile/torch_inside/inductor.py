"""Inductor: its compiler, its settings, and the passes of others that it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from .names import get_cpp_compiler, inductor_config, save_graph_repro

PRE_FUSION = "_pre_fusion_custom_pass"
"""Inductor's setting for a pass over the scheduler's nodes."""


def setting(name: str) -> Any:
    """The value of a setting of Inductor's, such as `"cpp.cxx"`."""
    return functools.reduce(getattr, name.split("."), inductor_config)


def cpp_compiler() -> str | None:
    """The command of the C++ compiler that Inductor finds; None: there is none."""
    try:
        return get_cpp_compiler()
    except RuntimeError:
        return None


def has_setting(name: str) -> bool:
    """Whether this release knows the setting."""
    return hasattr(inductor_config, name)


def results_of_callers(graph: fx.Graph) -> Collection[int]:
    """Which results, by number, of a graph that Inductor is about to lower have the strides that
    the caller expects. Others are stored for the backward, in any strides. All if it doesn't say.
    """
    output = graph.output_node()
    results: Any = output.args[0]
    found: Collection[int] = output.meta.get("user_visible_output_idxs", range(len(results)))
    return found


def results_of(compiled: Any) -> int:
    """How many results the code has that AOTAutograd's wrappers end in; -1: it is none."""
    strides = getattr(compiled, "output_strides", None)
    return -1 if strides is None else len(strides)


def write_program(file: Path, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Write a program of torch's alone that compares a graph compiled and not, for a report."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as program:
        save_graph_repro(program, gm, inputs, "inductor", accuracy=True)


def computes_reads(node: Any) -> bool:
    """Whether a node of the scheduler works out its reads: not where it is a call of a kernel."""
    return hasattr(node, "_compute_attrs")


def wrap_reads(node: Any, wrap: Callable[[Any], Any]) -> None:
    """Let `wrap` replace the method by which a node of the scheduler works out its reads."""
    node._compute_attrs = wrap(node._compute_attrs)
