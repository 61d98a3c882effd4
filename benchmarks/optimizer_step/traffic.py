"""Bytes that our step reads and writes, counted in the graphs that were compiled."""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import MPOptimizer, ir

__all__ = ["bytes_moved"]


def bytes_moved(optimizer: MPOptimizer) -> int:
    """Bytes that its one step reads and writes, each input of a graph read once. torch's fused
    AdamW reads p, g, m and v and writes p, m and v, and g if that is clipped.
    """
    (step,) = optimizer._steps.all
    traced = step.traced
    gradients = [m.param.grad for m in step.key.members if m.param.grad is not None]
    norms = sum(g.numel() * g.element_size() for g in gradients)
    if traced.fused:
        return norms + sum(g.numel() for g in gradients) * (32 if traced.config.clipped else 28)
    return norms + sum(len(u.calls) * _bytes(u.graph) for u in traced.updates)


def _bytes(gm: fx.GraphModule) -> int:
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
