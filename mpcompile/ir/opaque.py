"""Products that no pass sees: those in the bodies of opaque nodes, and opaque nodes that are one.

What an opaque node does stays as it was captured, so a product there runs in FP32 whatever the
level. The plan says how many those are, or nobody would know what is still to gain.
"""

from __future__ import annotations

from torch import fx

from .. import ir, rules


def products_in(node: fx.Node) -> int:
    """How many matrix products, convolutions and attentions an opaque node holds (each as often as
    the program says it, not as it runs). Under an autocast of the user's own, which applies inside
    as it always does, none of them counts.
    """
    region = ir.autocast_region(node)
    if not ir.is_opaque(node) or (region is not None and region[0]):
        return 0
    module = node.graph.owning_module
    return _count(module, node) if module is not None else 0


def _count(module: fx.GraphModule, node: fx.Node) -> int:
    """Of a node of that module: itself, and the bodies it is handed."""
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
    """What to say about it in the reason of the node, or nothing."""
    count = products_in(node)
    if count == 0:
        return ""
    return f"; {count} matrix product{'s stay' if count > 1 else ' stays'} FP32 there"
