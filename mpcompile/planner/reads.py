"""Who reads which value, through views; what of it may be read in another dtype."""

from __future__ import annotations

import math

import torch
from torch import fx

from .. import ir, rules
from ..rules.policy import Config


def read_by(node: fx.Node) -> list[fx.Node]:
    """The FP32 values that a node reads, and may read in another dtype."""
    if node.op == "output":
        return [n for n in node.all_input_nodes if ir.was_f32(n)]
    if ir.is_getitem(node):
        return list(node.all_input_nodes) if ir.was_f32(node) else []
    found = [n for i, n in ir.float_args(node) if rules.castable(node.target, i)]
    return list(dict.fromkeys(found))


def counted_operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose dtype counts: castable ones, no constant, no number that would promote."""
    found = [n for i, n in ir.float_args(node) if rules.castable(node.target, i)]
    # A constant takes the dtype of its company; guard_constants has seen that it survives that.
    found = [n for n in found if not ir.is_constant(n)] or found
    if ir.rule(node).promotes:
        return [n for n in found if ir.captured(n).ndim] or found  # type: ignore[union-attr]
    return found


def readers(node: fx.Node) -> list[fx.Node]:
    """Who reads the value, through views of it."""
    found: list[fx.Node] = []
    for user in node.users:
        found += readers(user) if is_view(user) else [user]
    return found


def is_view(node: fx.Node) -> bool:
    """Whether the node shows the elements of its operand, or one of several results."""
    return (ir.is_op(node) or ir.is_getitem(node)) and ir.kind(node) is rules.Kind.VIEW


def root(node: fx.Node) -> fx.Node:
    """What a view shows; another node itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_trained(node: fx.Node) -> bool:
    """Whether it is a weight, whose magnitude is known to be moderate, and no data."""
    return node.op == "placeholder" and (ir.is_parameter(node) or ir.requires_grad(node))


def cast_weights(node: fx.Node, config: Config) -> list[fx.Node]:
    """The FP32 parameters that a LOW node would cast."""
    inputs = node.graph.find_nodes(op="placeholder")
    found = []
    for operand in read_by(node):
        source = root(operand)
        if ir.is_parameter(source) and inputs.index(source) not in config.copied:
            found.append(source)
    return found


def elements(node: fx.Node) -> int:
    """Elements of what the node gives, with symbols at the values they were traced with."""
    return sum(
        math.prod(map(ir.hint, list(t.shape)))
        for t in ir.tensors_of(node.meta.get("mp_captured"))
        if t.dtype is torch.float32
    )
