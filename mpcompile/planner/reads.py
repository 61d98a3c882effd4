"""Which nodes read a value, also through views, which reads may be in another dtype, and which
operators Inductor will fuse into one kernel: a model made before it runs.

Every operator is in the kernel of its operands, unless one of the two is *apart*: a product, an
operator that doesn't fuse according to the table, or an unknown one. A node's level is the number
of kernels that must have run before its own; nodes of the same level may be in one kernel.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from .. import ir, rules
from ..padding.products import product
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
    sources = map(root, read_by(node))
    in_full = (n for n in sources if ir.is_parameter(n) and not ir.is_low_input(n))
    return [n for n in in_full if inputs.index(n) not in config.copied]


def elements(node: fx.Node) -> int:
    """The number of FP32 elements in the node's result; symbols have the values of the trace."""
    return sum(
        math.prod(map(ir.hint, list(t.shape)))
        for t in ir.tensors_of(node.meta.get("mp_captured"))
        if t.dtype is torch.float32
    )


# -- kernels ---------------------------------------------------------------------------------------


class Fusion:
    """The kernels of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._apart = {node: _is_apart(node) for node in graph.nodes}
        self._levels: dict[fx.Node, int] = {}
        for node in graph.nodes:
            after = [
                self._levels[n] + (self._apart[n] or self._apart[node])
                for n in node.all_input_nodes
                if ir.is_op(n) or ir.is_getitem(n)
            ]
            self._levels[node] = max(after, default=0)

    def is_apart(self, node: fx.Node) -> bool:
        """Whether the node is a kernel of its own: its operands and its result lie in memory."""
        return self._apart[node]

    def leaves(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether the node's value must lie in memory for this reader."""
        apart = self._apart[node] or self._apart[reader]
        return apart or self._levels[node] != self._levels[reader]

    def absorbs_below(self, node: fx.Node) -> bool:
        """Whether a cast of the node's result can be part of the kernel that computes it."""
        if is_view(node):
            return all(map(self.absorbs_below, read_by(node)[:1]))
        return ir.is_op(node) and not self._apart[node]

    def absorbs_above(self, node: fx.Node) -> bool:
        """Whether a cast of the node's operand can be part of the node's kernel."""
        if is_view(node):
            return all(map(self.absorbs_above, node.users))
        return not self._apart[node]


def _is_apart(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output") or ir.is_opaque(node):
        return True
    if ir.is_getitem(node):
        return False
    return not ir.is_op(node) or not ir.rule(node).fuses or product(node) is not None
