"""What a captured graph keeps from Dynamo's: the sources of inputs, their names, static marks.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import re

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch.utils import _pytree as pytree


def copy_provenance(gm: fx.GraphModule, traced: fx.GraphModule) -> None:
    """Copy what AOTAutograd reads from a graph of Dynamo's (static inputs, sources)."""
    traced.meta.update(gm.meta)
    theirs = gm.graph.find_nodes(op="placeholder")
    ours = traced.graph.find_nodes(op="placeholder")
    for old, new in zip(theirs, ours, strict=True):
        new._dynamo_source = getattr(old, "_dynamo_source", None)
        new._rename(_readable(source(new), old.name))
        new.target = new.name
        for key in ("tensor_dict", "stack_trace", "nn_module_stack"):
            if key in old.meta:
                new.meta[key] = old.meta[key]
    traced.meta["mp_output_dtypes"] = _output_dtypes(gm)
    known = getattr(gm, "_param_name_to_source", {})
    names = [n for n, _ in (*traced.named_parameters(), *traced.named_buffers())]
    traced._param_name_to_source = {  # type: ignore[assignment]
        name: known.get(name, ConstantSource(f"mpcompile_{name}")) for name in names
    }


def source(placeholder: fx.Node) -> str:
    """Dynamo's expression of an input: `L['self']._modules['fc']._parameters['weight']`."""
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)  # a method in 2.11, a property in 2.13


def _readable(source: str, fallback: str) -> str:
    """`L['self']._modules['fc']._parameters['weight']` -> `fc_weight`; `L['x'][0]` -> `x_0`."""
    words = re.findall(r"[A-Za-z0-9_]+", source)
    words = [w for w in words if w not in ("_modules", "_parameters", "_buffers")]
    name = "_".join(words[2:] if "_parameters" in source or "_buffers" in source else words[1:])
    return name if name.isidentifier() else fallback


def _output_dtypes(gm: fx.GraphModule) -> list[torch.dtype | None]:
    """The dtypes of the user's results: FP32, or what the user's own autocast made of it."""
    results = pytree.tree_leaves(gm.graph.output_node().args[0])
    examples = (r.meta.get("example_value") if isinstance(r, fx.Node) else None for r in results)
    return [e.dtype if isinstance(e, torch.Tensor) else None for e in examples]
