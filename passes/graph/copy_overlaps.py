"""Return a copy in place of a result whose elements share memory. A rewriting pass.

    unfold = unfold(x, 1, 2, 1)             unfold = unfold(x, 1, 2, 1)
    return unfold                     ->    unfold_copy = contiguous(unfold)
                                            return unfold_copy

AOTAutograd gives the gradient of a result the result's strides; of several elements written to one
place only the last survives (torch 2.12 and 2.13; `torch.compile` gives wrong gradients for such a
result). A result that is a view of an input, or shares memory with another result, is left alone:
AOTAutograd makes such a view outside of the graph, where autograd adds up correctly and no loss
scale is involved. So is a stride of 0, which `expand` makes: AOTAutograd handles it correctly.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.rules.policy import Config


def copy_overlaps(gm: fx.GraphModule, config: Config) -> bool:
    output = gm.graph.output_node()
    inputs = gm.graph.find_nodes(op="placeholder")
    if not any(map(ir.requires_grad, inputs)):
        return False
    results = list(output.args[0])  # type: ignore[arg-type]
    captured = gm.meta["mp_output_memory"]
    shared = {ir.storage(node) for node in inputs}
    shared |= {at for at, count in Counter(captured).items() if count > 1}
    for i, (result, at) in enumerate(zip(results, captured, strict=True)):
        value = ir.tensor(result) if isinstance(result, fx.Node) else None
        if value is None or not value.is_floating_point() or value.layout is not torch.strided:
            continue
        if at not in shared and _overlaps(value):
            results[i] = _copy(gm.graph, result)
    changed = results != list(output.args[0])  # type: ignore[arg-type]
    output.args = (tuple(results),)
    return changed


def _overlaps(value: torch.Tensor) -> bool:
    """Whether two elements share a place in memory, other than by a stride of 0."""
    sizes = zip(map(ir.hint, value.shape), map(ir.hint, value.stride()), strict=True)
    reach = 0  # from the first to the last element of the dimensions of smaller stride
    for stride, size in sorted((stride, size) for size, stride in sizes if size > 1 and stride > 0):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    why = ir.added(ir.Role.COPY, "its elements share memory, and their gradients would")
    name = f"{node.name}_copy"
    with graph.inserting_before(graph.output_node()):
        dense = ir.insert(aten.contiguous.default, node, name=name, like=node, decision=why)
    dense.meta["mp_captured"] = ir.value(dense)
    return dense
