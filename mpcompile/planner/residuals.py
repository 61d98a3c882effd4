"""The residual streams of a graph: `x` and `x + f(x)`, or `s * x + f(x)` with a weight or gate `s`,
where products compute `f`.

    layer_norm: FULL                           post-norm: the value itself is not rounded
    add: FULL = add(layer_norm, linear)        FP32 at O1, as under autocast
    add_1: FULL = add(add, linear_1)           `add` holds what all layers before have added

A rounding of the stream stays in it to the end, and comes back in the gradient of every layer:
nothing else that O2 stores costs as much accuracy. A stream that autocast keeps in the low dtype
(of convolutions, batch norms and activations alone) loses nothing against it, and is not found
here. Nor are rows of a table: the step's low copy of the table is what was rounded.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from .. import ir
from ..rules import Kind
from ..rules.policy import Precision
from .reads import counted_operands


def residual_streams(graph: fx.Graph) -> set[fx.Node]:
    """The undecided sums of a value that is FP32 at O1 and what products make of it; the value."""
    weights = _weights(graph)
    full = _full_at_o1(graph) - weights
    sums = [
        (node, _carried(stream, full, weights), {*read} - {stream})
        for node in filter(_adds, graph.nodes)
        if len(read := counted_operands(node)) > 1
        for stream in full.intersection(read)
        if ir.same_shape(ir.shape(stream), ir.shape(node))  # unlike a mask that all layers add
    ]
    is_made_of = _made_by_products(graph, {n for _, carried, _ in sums for n in carried})
    found: set[fx.Node] = set()
    for node, carried, others in sums:
        if any(is_made_of(other, n) for other in others for n in carried):
            found.update([node, *carried])
    return {node for node in found if ir.kind(node) is not Kind.MOVE}


def _adds(node: fx.Node) -> bool:
    """Whether it is a sum, or one of products: no operand alone makes it zero, nor is picked."""
    rule = ir.rule(node)
    one_of_products = rule.elementwise and not (rule.hands_on_tiny or rule.picks)
    return ir.precision(node) is Precision.FOLLOW and (rule.adds or one_of_products)


def _weights(graph: fx.Graph) -> set[fx.Node]:
    """Parameters, and what is computed from them alone."""
    weights: set[fx.Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        if ir.is_parameter(node) or (read and weights.issuperset(read)):
            weights.add(node)
    return weights


def _full_at_o1(graph: fx.Graph) -> set[fx.Node]:
    """What O1 keeps in FP32, whatever it costs: what reads an FP32 value is FP32."""
    full: set[fx.Node] = set()
    for node in graph.nodes:
        follows = ir.precision(node) is Precision.FOLLOW
        itself = ir.was_f32(node) and ir.precision(node) is not Precision.LOW
        if not full.isdisjoint(_operands(node)) if follows else itself:
            full.add(node)
    return full


def _made_by_products(graph: fx.Graph, values: set[fx.Node]) -> Callable[[fx.Node, fx.Node], bool]:
    """Whether a node depends on one of these values with a product in between."""
    bits = {value: 1 << number for number, value in enumerate(values)}
    read: dict[fx.Node, int] = {}  # all values in one walk: some are read again in every layer
    made: dict[fx.Node, int] = {}
    for node in graph.nodes:
        is_product = ir.rule(node).precision is Precision.LOW  # also one that is pinned to FP32
        read[node], made[node] = bits.get(node, 0), 0
        for operand in node.all_input_nodes:
            read[node] |= read[operand]
            made[node] |= (read if is_product else made)[operand]
    return lambda node, value: bool(made[node] & bits[value])


def _carried(stream: fx.Node, full: set[fx.Node], weights: set[fx.Node]) -> set[fx.Node]:
    """The value, and what it shows or only scales: views, a dropout, a product with a gate."""

    def further(node: fx.Node) -> set[fx.Node]:
        read = set(_operands(node))
        is_sum = len(read - weights) > 1 and _adds(node)
        return full & read if ir.precision(node) is Precision.FOLLOW and not is_sum else set()

    return set(ir.reached([stream], further))


def _operands(node: fx.Node) -> list[fx.Node]:
    """The FP32 values that a node computes with; of one of several results, all of these."""
    return node.all_input_nodes if ir.is_getitem(node) else counted_operands(node)
