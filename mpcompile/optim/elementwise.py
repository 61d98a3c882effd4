"""Whether a step may run on each rank's part of its parameters: only if it is elementwise.

What a rank computes of its shard is what the whole tensor's step would give there, if each element
of a parameter and of its state follows from the same element of its gradient and state, and from
numbers that all ranks have. This is proved for each operator of the traced step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.optim import Optimizer

from .. import ir
from ..errors import CannotRewrite
from ..ir import aten
from ..ranks.shards import Layout, layout_of
from .compiled import is_pointwise
from .members import Member

# Make a tensor whose elements are all equal, so that a part of it is like the whole.
_CONSTANT = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)


def refuse_mixing(graph: fx.Graph, members: Sequence[Member]) -> None:
    """Check the graph of a step, before any pass, over parameters that may be DTensors.

    Raises:
        CannotRewrite: an operator isn't elementwise; says which.
    """
    layouts = {i: layout_of(member.param) for i, member in enumerate(members)}
    reached: dict[fx.Node, set[Layout | None]] = {}  # how what each value depends on is laid out
    for node in graph.nodes:
        if node.op == "placeholder":
            slot, value = ir.slot_of(node), node.meta["val"]
            large = slot.kind in ("param", "grad") or (
                slot.kind == "state" and isinstance(value, torch.Tensor) and value.ndim > 0
            )
            reached[node] = {layouts[slot.index]} if large else set()
        elif node.op == "call_function":
            reached[node] = set().union(*(reached[n] for n in node.all_input_nodes))
            if reached[node] != {None} and not _is_elementwise(node, reached):
                name = str(node.target).removeprefix("aten.").split(".")[0]
                raise CannotRewrite(
                    f"its parameters are sharded over processes, and its operator {name} is not "
                    "elementwise, so that a process can't do it on its shards"
                )


def _is_elementwise(node: fx.Node, reached: dict[fx.Node, set[Layout | None]]) -> bool:
    if not node.all_input_nodes:
        return node.target in _CONSTANT
    if not reached[node]:  # computed from numbers and constants alone
        return is_pointwise(node) or not any(v.ndim for v in ir.tensors_of(node.meta["val"]))
    values = [n.meta["val"] for n in node.all_input_nodes if reached[n]]
    shapes = {tuple(v.shape) for v in ir.tensors_of(values)}
    results = {tuple(v.shape) for v in ir.tensors_of(node.meta["val"])}
    name = getattr(node.target, "__name__", "")
    several = name.startswith(("_foreach_", "getitem"))  # the multi-tensor form of pointwise ones
    keeps_places = several or (is_pointwise(node) and len(shapes) == 1)
    return len(reached[node]) == 1 and results <= shapes and keeps_places


def check_state(members: Sequence[Member], optimizer: Optimizer) -> None:
    """Refuse state of a DTensor that doesn't lie on the ranks as the parameter does.

    Raises:
        CannotRewrite: some state doesn't; says which.
    """
    for member in members:
        layout = layout_of(member.param)
        for key, value in optimizer.state.get(member.param, {}).items() if layout else ():
            if isinstance(value, torch.Tensor) and value.ndim and layout_of(value) != layout:
                raise CannotRewrite(
                    f"its parameters are sharded over processes, and its state {key!r} is not "
                    "sharded like them"
                )
