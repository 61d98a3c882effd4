"""Inductor: its compiler, its settings, and the passes of others that it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from .private_names import Part, attribute, private

_NEEDED = "keeps the order of reads and writes"

if TYPE_CHECKING:
    from torch import _TorchCompileInductorWrapper as InductorBackend
    from torch._dynamo.repro.after_aot import save_graph_repro
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.compile_fx import compile_fx_inner as compile_inner
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.custom_graph_pass import (
        CustomGraphPass,
        CustomPartitionerFn,
        get_hash_for_files,
    )
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils._ordered_set import OrderedSet
else:
    InductorBackend = private(
        "torch:_TorchCompileInductorWrapper", "reads torch.compile's options", Part.INDUCTOR
    )
    config = private("torch._inductor:config", "holds Inductor's settings", Part.INDUCTOR)
    compile_fx = private("torch._inductor.compile_fx:compile_fx", "compiles a graph", Part.INDUCTOR)
    compile_inner = private(
        "torch._inductor.compile_fx:compile_fx_inner", "compiles one graph", Part.INDUCTOR
    )
    cache_dir = private(
        "torch._inductor.runtime.cache_dir_utils:cache_dir",
        "holds what was compiled",
        Part.INDUCTOR,
    )
    save_graph_repro = private(
        "torch._dynamo.repro.after_aot:save_graph_repro", "writes a program for a report", Part.SAY
    )
    _PASSES = "torch._inductor.custom_graph_pass"
    CustomGraphPass = private(f"{_PASSES}:CustomGraphPass", "is a pass of ours", Part.INDUCTOR)
    CustomPartitionerFn = private(f"{_PASSES}:CustomPartitionerFn", "parts graphs", Part.INDUCTOR)
    get_hash_for_files = private(f"{_PASSES}:get_hash_for_files", "keys caches", Part.INDUCTOR)
    get_cpp_compiler = private(
        "torch._inductor.cpp_builder:get_cpp_compiler", "finds the C++ compiler", Part.INDUCTOR
    )
    StarDep = private("torch._inductor.dependencies:StarDep", _NEEDED, Part.INDUCTOR)
    WeakDep = private("torch._inductor.dependencies:WeakDep", _NEEDED, Part.INDUCTOR)
    OrderedSet = private("torch.utils._ordered_set:OrderedSet", _NEEDED, Part.INDUCTOR)

# From 2.13 on, the caches want passes over the scheduler's nodes to be of a class of their own.
CustomSchedulerPass: Any = private(
    "torch._inductor.custom_graph_pass:CustomSchedulerPass",
    "is a pass of ours over the scheduler's nodes",
    Part.INDUCTOR,
    "torch._inductor.custom_graph_pass:CustomGraphPass",
)
PRE_FUSION = "_pre_fusion_custom_pass"
"""Inductor's setting for a pass over the scheduler's nodes."""

__all__ = [
    "PRE_FUSION",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "CustomSchedulerPass",
    "InductorBackend",
    "OrderedSet",
    "StarDep",
    "WeakDep",
    "cache_dir",
    "compile_fx",
    "compile_inner",
    "computes_reads",
    "config",
    "cpp_compiler",
    "get_hash_for_files",
    "has_setting",
    "results_of",
    "results_of_callers",
    "setting",
    "wrap_reads",
    "write_program",
]


def setting(name: str) -> Any:
    """The value of a setting of Inductor's, such as `"cpp.cxx"`."""
    return functools.reduce(getattr, name.split("."), config)


def cpp_compiler() -> str | None:
    """The command of the C++ compiler that Inductor finds; None: there is none."""
    try:
        return get_cpp_compiler()
    except RuntimeError:
        return None


def has_setting(name: str) -> bool:
    """Whether this release knows the setting."""
    return hasattr(config, name)


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


attribute("torch._inductor.scheduler:SchedulerNode._compute_attrs", _NEEDED, Part.INDUCTOR)
attribute("torch._inductor.config:joint_custom_post_pass", "runs passes of ours", Part.INDUCTOR)
attribute(
    "torch._inductor.output_code:CompiledFxGraph.output_strides",
    "is called without wrappers",
    Part.CALLS,
)
