"""What a captured graph keeps from Dynamo's: the sources of inputs, their names, static marks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..ir.text import OWN_CALL
from ..torch_inside.graphs import rename, set_source, set_sources, source_of, sources_of
from ..torch_inside.names import ConstantSource, pytree


def copy_provenance(gm: fx.GraphModule, traced: fx.GraphModule) -> None:
    """Copy what AOTAutograd reads from a graph of Dynamo's (static inputs, sources)."""
    traced.meta.update(gm.meta)
    theirs = gm.graph.find_nodes(op="placeholder")
    ours = traced.graph.find_nodes(op="placeholder")
    for old, new in zip(theirs, ours, strict=True):
        set_source(new, source_of(old))
        rename(new, _readable(source(new), old.name))
        new.target = new.name
        for key in ("tensor_dict", "stack_trace", "nn_module_stack"):
            if key in old.meta:
                new.meta[key] = old.meta[key]
    traced.meta["mp_output_dtypes"] = _output_dtypes(gm)
    known = sources_of(gm)
    names = [n for n, _ in (*traced.named_parameters(), *traced.named_buffers())]
    set_sources(
        traced, {name: known.get(name, ConstantSource(f"mpcompile_{name}")) for name in names}
    )


# Dynamo's expression of the module in the entry function of a compiled module (`runtime/`).
ENTRY = "L['module']"


def complete_module_paths(
    traced: fx.GraphModule, inputs: Sequence[Any], names: Mapping[int, str]
) -> None:
    """Make the module paths of all nodes start at the model.

    With a graph break inside of a submodule's forward, Dynamo compiles that forward by itself, and
    its paths start at the submodule. The full name of one of its parameters tells where that is.
    So it does where a submodule was compiled as a part of the model; its own operators have no path
    then.

    Args:
        traced: the captured graph.
        inputs: what the graph was called with, one for each placeholder.
        names: id of a parameter -> its dotted name in the model.
    """
    roots: dict[str, str] = {}  # Dynamo's expression of a module -> what its path lacks in front
    for value, node in zip(inputs, traced.graph.find_nodes(op="placeholder"), strict=True):
        name = names.get(id(value))
        root, *words = re.findall(r"\['(\w+)'\]", source(node)) or [""]
        local = ".".join(words)
        if name and local and name.endswith(f".{local}"):
            missing = name.removesuffix(local).split(".")[:-1]
            roots[f"L['{root}']"] = "".join(f"._modules['{word}']" for word in missing)
    for node in traced.graph.nodes if roots else ():
        if stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {
                key: (_below(path, roots), kind) for key, (path, kind) in stack.items()
            }
        elif ENTRY in roots:
            node.meta["nn_module_stack"] = {"": (ENTRY + roots[ENTRY], torch.nn.Module)}


def _below(path: str, roots: Mapping[str, str]) -> str:
    for root, missing in roots.items():
        if path == root or path.startswith((f"{root}.", f"{root}[")):
            return root + missing + path.removeprefix(root)
    return path


def source(placeholder: fx.Node) -> str:
    """Dynamo's expression of an input: `L['self']._modules['fc']._parameters['weight']`."""
    return str(getattr(source_of(placeholder), "name", "")).replace(OWN_CALL, "")


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
