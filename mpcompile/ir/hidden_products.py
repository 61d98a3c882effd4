"""What no pass sees: the calls in the bodies of opaque nodes.

An opaque node stays as it was captured, so a product in it runs in FP32 at every level. The plan
says how many there are: that is work which could still gain.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from .. import rules
from .values import attribute, autocast_region, is_opaque, op_name


def hidden_calls(node: fx.Node) -> Iterator[str]:
    """The names of what an opaque node calls: its own, and those in its bodies, each as often as it
    is written, not as it runs.
    """
    module = node.graph.owning_module
    if is_opaque(node) and module is not None:
        yield from _calls(module, node)


def _calls(module: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """The calls of one node of `module`: the node itself, and the bodies among its arguments."""
    yield op_name(node)
    for argument in dict.fromkeys(node.all_input_nodes):
        body = attribute(module, argument) if argument.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            for inner in body.graph.nodes:
                if inner.op in ("call_function", "call_method"):
                    yield from _calls(body, inner)


def products_in(node: fx.Node) -> int:
    """How many matrix products, convolutions and attentions an opaque node holds. 0 under an
    autocast of the user's, which applies inside the node as always.
    """
    region = autocast_region(node)
    if region is not None and region[0]:
        return 0
    return sum(map(rules.multiplies, hidden_calls(node)))


def described(node: fx.Node) -> str:
    """The part of the node's reason that states this count, or the empty string."""
    count = products_in(node)
    if count == 0:
        return ""
    return f"; {count} matrix product{'s stay' if count > 1 else ' stays'} FP32 there"
