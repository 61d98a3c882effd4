"""The residual streams of a graph: `x` and `x + f(x)`, or `s * x + f(x)` with a weight `s`, where
products compute `f`.

    layer_norm: FULL                           post-norm: the value itself is not rounded
    add: FULL = add(layer_norm, linear)        FP32 at O1, as under autocast
    add_1: FULL = add(add, linear_1)           `add` holds what all layers before have added

A rounding of the stream stays in it to the end, and comes back in the gradient of every layer:
nothing else that O2 stores costs as much accuracy. A stream that autocast keeps in the low dtype
(of convolutions, batch norms and activations alone) loses nothing against it, and is not found
here. Nor are rows of a table: the step's low copy of the table is what was rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import fx

from .. import ir
from ..rules import Kind
from ..rules.policy import Precision
from .reads import counted_operands


def residual_streams(graph: fx.Graph) -> set[fx.Node]:
    """The undecided sums of a value that is FP32 at O1 and what products make of it; the value."""
    weights = _weights(graph)
    full = _full_at_o1(graph)
    sums: list[tuple[fx.Node, list[fx.Node], fx.Node]] = []
    for node in full:
        read = counted_operands(node) if ir.rule(node).adds else []
        if ir.precision(node) is Precision.FOLLOW and len(read) == 2:
            for stream, result in (read, read[::-1]):
                if stream in full and stream not in weights:
                    sums.append((node, list(_carried(stream, weights)), result))
    is_made_of = _made_by_products(graph, {n for _, carried, _ in sums for n in carried})
    found: set[fx.Node] = set()
    for node, carried, result in sums:
        if any(is_made_of(result, n) for n in carried):
            found.update([node, *carried])
    return {node for node in found if ir.kind(node) is not Kind.MOVE}


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


def _made_by_products(
    graph: fx.Graph, values: Iterable[fx.Node]
) -> Callable[[fx.Node, fx.Node], bool]:
    """Whether a node depends on one of these values with a product in between."""
    bits = {value: 1 << number for number, value in enumerate(values)}
    read: dict[fx.Node, int] = {}  # all values in one walk: some are read again in every layer
    made: dict[fx.Node, int] = {}
    for node in graph.nodes:
        read[node] = made[node] = 0
        for operand in node.all_input_nodes:
            read[node] |= read[operand]
            made[node] |= made[operand]
        if ir.rule(node).precision is Precision.LOW:  # also a product that is pinned to FP32
            made[node] = read[node]
        read[node] |= bits.get(node, 0)
    return lambda node, value: bool(made[node] & bits[value])


def _carried(stream: fx.Node, weights: set[fx.Node]) -> Iterator[fx.Node]:
    """The value, and what it shows or only scales: views, a dropout, a product with a weight."""
    yield stream
    while ir.precision(stream) is Precision.FOLLOW:
        shown = [n for n in _operands(stream) if n not in weights]
        if len(shown) != 1:
            break
        (stream,) = shown
        yield stream


def _operands(node: fx.Node) -> list[fx.Node]:
    """The FP32 values that a node computes with; of one of several results, all of these."""
    return node.all_input_nodes if ir.is_getitem(node) else counted_operands(node)
