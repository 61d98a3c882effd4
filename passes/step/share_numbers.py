"""Compute a number once that each parameter's update would compute for itself. A rewriting pass.

    mul = mul(lr0, 0.01)                                mul = mul(lr0, 0.01)
    mul_1 = mul(lr0, 0.01)                       ->
    add(param1, mul_1)                                  add(param1, mul)

What follows from a setting alone is the same for all parameters of a group. (A bias correction
follows from a parameter's own counter.) A number is a 0-d tensor.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import StepConfig
from mpcompile.torch_inside.ops import OpOverload, schema


def share_numbers(gm: fx.GraphModule, config: StepConfig) -> bool:
    known: dict[object, fx.Node] = {}
    changed = False
    for node in list(gm.graph.nodes):
        if not _is_number(node):
            continue
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            changed = True
    return changed


def _is_number(node: fx.Node) -> bool:
    """Whether a node computes a number from numbers, and nothing else."""
    target = node.target
    return (
        isinstance(target, OpOverload)
        and (torch.Tag.pointwise in target.tags or target is aten._to_copy.default)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not schema(target).is_mutable
        and ir.value(node).ndim == 0
    )
