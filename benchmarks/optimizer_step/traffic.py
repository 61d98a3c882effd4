"""Bytes that our step reads and writes, counted in the pieces that were compiled."""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import MPOptimizer, ir

__all__ = ["bytes_moved"]


def bytes_moved(optimizer: MPOptimizer) -> int:
    """Bytes that the compiled pieces of its one step read and write, each input read once."""
    (step,) = optimizer._steps.all
    whole = step.program.step
    commits = sum(2 * _size(value) for _, value in whole.commits)
    return commits + sum(_piece_bytes(piece.graph) for piece in whole.pieces)


def _piece_bytes(gm: fx.GraphModule) -> int:
    read = [n for n in gm.graph.find_nodes(op="placeholder") if any(_reads(u, n) for u in n.users)]
    copied = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    results = gm.graph.output_node().all_input_nodes
    return sum(map(_size, [*read, *(n.args[0] for n in copied), *results]))


def _reads(user: fx.Node, node: fx.Node) -> bool:
    """Whether the value is needed: not if the node is only what is written to."""
    return user.target is not torch.ops.aten.copy_.default or user.args[1] is node


def _size(node: fx.Node) -> int:
    value = ir.value(node)
    return value.numel() * value.element_size()
