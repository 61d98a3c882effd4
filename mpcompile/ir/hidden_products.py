"""The matrix products that no pass sees: in the bodies of opaque nodes, or opaque nodes themselves.

An opaque node stays as it was captured, so a product in it runs in FP32 at every level. The plan
says how many there are: that is work which could still gain.
"""

from __future__ import annotations

from torch import fx

from .. import ir, rules


def products_in(node: fx.Node) -> int:
    """How many matrix products, convolutions and attentions an opaque node holds, each counted as
    often as it is written, not as it runs. 0 under an autocast of the user's, which applies inside
    the node as always.
    """
    region = ir.autocast_region(node)
    if not ir.is_opaque(node) or (region is not None and region[0]):
        return 0
    module = node.graph.owning_module
    return _count(module, node) if module is not None else 0


def _count(module: fx.GraphModule, node: fx.Node) -> int:
    """The products of one node of `module`: the node itself, and the bodies among its arguments."""
    bodies = (
        ir.attribute(module, n) for n in dict.fromkeys(node.all_input_nodes) if n.op == "get_attr"
    )
    return rules.multiplies(ir.op_name(node)) + sum(
        _count(body, inner)
        for body in bodies
        if isinstance(body, fx.GraphModule)
        for inner in body.graph.nodes
        if inner.op in ("call_function", "call_method")
    )


def described(node: fx.Node) -> str:
    """The part of the node's reason that states this count, or the empty string."""
    count = products_in(node)
    if count == 0:
        return ""
    return f"; {count} matrix product{'s stay' if count > 1 else ' stays'} FP32 there"
