"""What `compile_inference` returns: Inductor's own callable, and what it needs to live."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import fx
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


def test_what_inductor_compiled_lives_as_long_as_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A `CompiledFxGraph` that is collected deletes the partitions that a function with CUDA graphs
    calls: `'Runner' object has no attribute 'partitions'`, in the first step.
    """
    made = []
    compile_inner = vars(inference)["compile_fx_inner"]

    def noted(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_inner(*args, **kwargs)
        made.append(weakref.ref(compiled))
        return compiled

    monkeypatch.setattr(inference, "compile_fx_inner", noted)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm, value = doubled(mode)
    run = inference.compile_inference(gm, [value], mode, static=(), shares_memory=False, patches={})
    gc.collect()
    assert [compiled() is not None for compiled in made] == [True]
    (total,) = run([torch.ones(8)])
    assert total.tolist() == [2.0] * 8
    del run
    gc.collect()
    assert [compiled() for compiled in made] == [None]
