"""In-place updates of parameters: an optimizer's step that Dynamo traced, or a handwritten one.

Mixed precision relies on FP32 master weights, so the values written into them, and the moments
those are computed from, must never be rounded. Two checks ensure that:

* `is_update`: Dynamo's graph is an optimizer's step as a whole. It is compiled unchanged.
* `nodes_of_updates`: in any other graph, a value written into a parameter or a gradient, and the
  values it is computed from, keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..torch_inside.names import is_functorch_wrapped_tensor
from ..torch_inside.tensors import storage_of


def is_update(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a graph of Dynamo's is an optimizer's step, or does one's work by hand: autograd
    tracks nothing in it, and something is written into a leaf that requires a gradient.
    """
    operators = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    made = (t for node in operators for t in ir.tensors_of(node.meta.get("example_value")))
    if any(map(_is_tracked, made)):
        return False
    placeholders = gm.graph.find_nodes(op="placeholder")
    held = [(node, example) for node, example in zip(placeholders, example_inputs, strict=True)]
    # Tensors that Dynamo knows to belong to an optimizer are attributes of the graph, not inputs.
    held += [(node, ir.attribute(gm, node)) for node in gm.graph.find_nodes(op="get_attr")]
    leaves = {
        place
        for node, value in held
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
        for place in _memory(node)
    }
    written = (place for n in operators for w in ir.written_by_name(n) for place in _memory(w))
    return not leaves.isdisjoint(written)


def _is_tracked(value: torch.Tensor) -> bool:
    """Whether autograd has made it from something else that it tracks."""
    try:
        return value.requires_grad and not value.is_leaf
    except RuntimeError:  # a view from within no_grad, of what was written since: nobody may use it
        return False


def _memory(node: fx.Node) -> Iterator[int]:
    """Identities of the memory of the tensors that Dynamo saw the node make; equal for aliases."""
    for tensor in ir.tensors_of(node.meta.get("example_value")):
        # Inside a functorch transform, a tensor of its own has no memory to ask for.
        if tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor):
            yield storage_of(tensor)


def nodes_of_updates(graph: fx.Graph) -> set[fx.Node]:
    """The writes to a parameter or a gradient, and all they are computed from that autograd doesn't
    track. What it does track is a forward (a codebook, say, keeps an average of its results).
    """
    inputs = graph.find_nodes(op="placeholder")
    trained = [n for n in inputs if ir.is_parameter(n) and ir.requires_grad(n)]
    memory = {ir.storage(n) for n in (*trained, *filter(ir.is_gradient, inputs))} - {None}
    found: set[fx.Node] = set()
    if not memory:
        return found
    # In reverse: a value written into memory counts for all later reads of that memory.
    for node in reversed(graph.nodes):
        if node in found or not memory.isdisjoint(map(ir.storage, ir.written(node))):
            untracked = [n for n in node.all_input_nodes if not ir.requires_grad(n)]
            found.update((node, *untracked))
            memory.update(p for p in map(ir.storage, untracked) if p is not None)
    return found
