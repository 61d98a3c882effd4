"""A model of which operators Inductor will fuse into one kernel, made before Inductor runs.

Every operator is in the kernel of its operands, unless one of the two is *apart*: a product, an
operator that doesn't fuse according to the table, or an unknown one. A node's level is the number
of kernels that must have run before its own; nodes of the same level may be in one kernel.
"""

from __future__ import annotations

from torch import fx

from .. import ir
from ..padding.products import product
from .reads import is_view, read_by


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
