"""A graph of ATen operators without autograd, which may write to inputs -> a function, by Inductor.

So are compiled the graphs of an optimizer's step (`optim/compiled.py`) and whole training
steps (`whole_step/one_graph.py`).

CUDA graphs: whether a function becomes one, and results of it that outlive its next replay. A
replay reads and writes the same memory as the one before, and what it returns lies there. So
whoever keeps a result (a loop that collects its losses) would find the last step's value in all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from .._version import __version__
from ..devices.registry import capabilities
from ..ir import aten
from ..torch_inside.graphs import STATIC_INPUT, set_source, set_sources
from ..torch_inside.inductor import has_setting, results_of, setting
from ..torch_inside.names import FakeTensorMode, TracingContext, autocast_off, tracing
from ..verify.first_call import compile_verified
from ..verify.verdicts import Verify
from .write_order import inductor_for

# Takes a list of the inputs, which it may empty, and returns all results.
Function = Callable[[list[Any]], Sequence[Any]]

_JOINS = (aten.cat.default, aten.stack.default)

# The number of pointers to norms that fit into a kernel's arguments: 4 KB are always allowed.
_JOINED = 400
# Inductor fuses at most eight inputs of a `cat` by default. The second name is not in 2.12.
_FUSED = ("max_pointwise_cat_inputs", "max_complex_pointwise_cat_inputs")


def compile_inference(
    gm: fx.GraphModule,
    values: Sequence[Any],
    mode: FakeTensorMode | None,
    *,
    static: Sequence[fx.Node],
    shares_memory: bool,
    patches: Any,
    verify: Verify | None = None,
) -> Function:
    """Compile a graph that returns a tuple of tensors.

    Args:
        gm: it; its metadata is changed.
        values: its inputs: FakeTensors that don't require grad.
        mode: theirs.
        static: the placeholders that are the same memory in each call.
        shares_memory: whether some input or result may share memory with another one.
        patches: settings of Inductor.
        verify: how it is verified; None: at its first call.

    Returns:
        A function that is called without grad mode.
    """
    _mark(gm, static)
    gm._mpcompile_version = __version__  # type: ignore[assignment]  # a part of the cache's key
    results: Any = gm.graph.output_node().args[0]
    count = len(results)
    with torch.no_grad(), autocast_off(), tracing(TracingContext(mode)):
        wrapped = compile_verified(gm, list(values), patches, verify or Verify())
    # What adds an input to Inductor's graph, as a random state, adds a result, too; two inputs that
    # are one share memory.
    inner = inspect.unwrap(wrapped)
    if shares_memory or results_of(inner) != count:
        return lambda given: wrapped(*given)
    # AOTAutograd's wrapper is for what is shared, and for writes that it makes results. It costs as
    # much as the call of a small kernel; so do the look-ups of Inductor's own object in each call.
    run = functools.partial(inner.current_callable)
    # When that object goes, it deletes what a callable with CUDA graphs calls. A partial's
    # attribute keeps it, and costs nothing in a call.
    run.owner = inner  # type: ignore[attr-defined]
    return run


def options_for_joins(graph: fx.Graph, device: torch.device) -> Mapping[str, int]:
    """Options of Inductor for a graph on this device. If the results of all joins in it are short,
    each is one kernel: that one searches all inputs for each element of the result.
    """
    short = all(ir.value(n).numel() <= _JOINED for n in graph.nodes if n.target in _JOINS)
    fuses = short and capabilities(device).multi_tensor
    return dict.fromkeys(filter(has_setting, _FUSED), _JOINED) if fuses else {}


def _mark(gm: fx.GraphModule, static: Sequence[fx.Node]) -> None:
    """Tell CUDA graphs which inputs keep their address, in Dynamo's form (`mark_static_address`):
    CUDA graphs don't record a graph that writes to any other input.
    """
    gm.meta["dynamo_compile_id"] = None
    set_sources(gm, {})
    for node in gm.graph.find_nodes(op="placeholder"):
        set_source(node, None)
    for node in static:
        node.meta["tensor_dict"] = {STATIC_INPUT: "unguarded"}


# -- CUDA graphs ---------------------------------------------------------------------------------

_RECORDS = "triton.cudagraphs"


def replays(mode: str | None, options: Mapping[str, Any] | None, device: torch.device) -> bool:
    """Whether what Inductor compiles for this device, mode and options becomes a CUDA graph."""
    patches = inductor_for(mode, options).config
    records = patches.get(_RECORDS, setting(_RECORDS))
    return bool(records) and capabilities(device).cuda_graphs


def outliving(run: Function, made: Sequence[bool]) -> Function:
    """A function that returns copies of the results of `run`.

    Args:
        run: a function that may be replayed.
        made: for each result, whether it is memory that `run` made; others are its inputs, or views
            of them. Those that share memory still do so when copied.
    """

    def run_and_copy(values: list[Any]) -> Sequence[Any]:
        results = list(run(values))
        copies: dict[int, torch.UntypedStorage] = {}  # by address
        for i, (result, own) in enumerate(zip(results, made, strict=True)):
            if own and isinstance(result, torch.Tensor):
                memory = result.untyped_storage()
                at = memory.data_ptr()
                if at not in copies:
                    copies[at] = memory.clone()
                place = result.storage_offset(), result.size(), result.stride()
                results[i] = result.new_empty(0).set_(copies[at], *place)
        return results

    return run_and_copy
