"""What `compile_inference` returns: Inductor's own callable, and what it needs to live."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.output_code import CompiledFxGraph
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.lower import inference


def doubled(mode: FakeTensorMode) -> tuple[fx.GraphModule, torch.Tensor]:
    """A graph that returns (x + x,), and the x that it is compiled for."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = value = torch.empty(8)
    total = graph.call_function(aten.add.Tensor, (x, x))
    ir.refresh(total)
    graph.output((total,))
    return fx.GraphModule({}, graph), value


def compiled() -> Any:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm, value = doubled(mode)
    return inference.compile_inference(
        gm, [value], mode, static=(), shares_memory=False, patches={}
    )


def test_what_inductor_compiled_lives_as_long_as_its_function() -> None:
    """A `CompiledFxGraph` that is collected deletes the partitions that a function with CUDA graphs
    calls: `'Runner' object has no attribute 'partitions'`, in the first step.
    """
    run = compiled()
    inner = weakref.ref(run.owner)
    gc.collect()
    assert run.func == inner().current_callable
    (total,) = run([torch.ones(8)])
    assert total.tolist() == [2.0] * 8
    del run
    gc.collect()
    assert inner() is None


def test_a_second_process_finds_the_function_in_torchs_cache() -> None:
    """And calls it without AOTAutograd's wrapper, as the first one does."""
    compiled()  # as in an earlier process
    counters.clear()
    run = compiled()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert isinstance(run.owner, CompiledFxGraph)
    (total,) = run([torch.ones(8)])
    assert total.tolist() == [2.0] * 8
