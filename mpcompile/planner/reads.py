"""Which nodes read a value, also through views, and which reads may be in another dtype."""

from __future__ import annotations

import math

import torch
from torch import fx

from .. import ir, rules
from ..rules.policy import Config


def read_by(node: fx.Node) -> list[fx.Node]:
    """The FP32 values that a node reads and that may be given to it in another dtype."""
    if node.op == "output":
        return [n for n in node.all_input_nodes if ir.was_f32(n)]
    if ir.is_getitem(node):
        return list(node.all_input_nodes) if ir.was_f32(node) else []
    found = [n for i, n in ir.float_args(node) if rules.castable(node.target, i)]
    return list(dict.fromkeys(found))


def counted_operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose dtype counts: castable, not constants, not 0-d numbers that promote."""
    found = [n for i, n in ir.float_args(node) if rules.castable(node.target, i)]
    # A constant takes the dtype of the other operands; guard_constants checked that it may.
    found = [n for n in found if not ir.is_constant(n)] or found
    if ir.rule(node).promotes:
        return [n for n in found if ir.captured(n).ndim] or found  # type: ignore[union-attr]
    return found


def readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read the value, directly or through views."""
    found: list[fx.Node] = []
    for user in node.users:
        found += readers(user) if is_view(user) else [user]
    return found


def is_view(node: fx.Node) -> bool:
    """Whether the node shows elements of its operand, or picks one of several results."""
    return (ir.is_op(node) or ir.is_getitem(node)) and ir.kind(node) is rules.Kind.VIEW


def root(node: fx.Node) -> fx.Node:
    """The value that a view shows; for a node that is no view, the node itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_trained(node: fx.Node) -> bool:
    """Whether the node is a weight, whose magnitude is known to be moderate, and not data."""
    return node.op == "placeholder" and (ir.is_parameter(node) or ir.requires_grad(node))


def cast_weights(node: fx.Node, config: Config) -> list[fx.Node]:
    """The FP32 parameters that the node would cast if it were LOW: not those stored low."""
    inputs = node.graph.find_nodes(op="placeholder")
    found = []
    for operand in read_by(node):
        source = root(operand)
        in_full = ir.is_parameter(source) and not ir.is_low_input(source)
        if in_full and inputs.index(source) not in config.copied:
            found.append(source)
    return found


def elements(node: fx.Node) -> int:
    """The number of FP32 elements in the node's result; symbols have the values of the trace."""
    return sum(
        math.prod(map(ir.hint, list(t.shape)))
        for t in ir.tensors_of(node.meta.get("mp_captured"))
        if t.dtype is torch.float32
    )
