"""The residual streams of a graph: `x + f(x)`, where products compute `f`, and `x`.

    layer_norm: FULL                           post-norm: the value itself is not rounded
    add: FULL = add(layer_norm, linear)        FP32 at O1, as under autocast
    add_1: FULL = add(add, linear_1)           `add` holds what all layers before have added

A rounding of the stream stays in it to the end, and comes back in the gradient of every layer:
nothing else that O2 stores costs as much accuracy. A stream that autocast keeps in the low dtype
(of convolutions, batch norms and activations alone) loses nothing against it, and is not found
here. Nor are rows of a table: the step's low copy of the table is what was rounded.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from .. import ir
from ..rules import Kind
from ..rules.policy import Precision
from .reads import counted_operands


def residual_streams(graph: fx.Graph) -> set[fx.Node]:
    """The undecided sums of a value that is FP32 at O1 and what products make of it, and what shows
    that value.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    full = _full_at_o1(graph)
    found: set[fx.Node] = set()
    for node in full:
        read = counted_operands(node) if ir.rule(node).adds else []
        if ir.precision(node) is Precision.FOLLOW and len(read) == 2:
            for stream, result in (read, read[::-1]):
                carried = list(_carried(stream))
                activation = stream in full and not ir.is_parameter(carried[-1])
                if activation and _made_of(place, result, carried):
                    found.update([node, *carried])
    return {node for node in found if ir.kind(node) is not Kind.MOVE}


def _full_at_o1(graph: fx.Graph) -> set[fx.Node]:
    """What O1 keeps in FP32, whatever it costs: what reads an FP32 value is FP32."""
    full: set[fx.Node] = set()
    for node in filter(ir.was_f32, graph.nodes):
        if ir.precision(node) is not Precision.FOLLOW:
            wide = ir.precision(node) is not Precision.LOW
        else:
            wide = any(operand in full for operand in counted_operands(node))
        if wide:
            full.add(node)
    return full


def _made_of(place: dict[fx.Node, int], result: fx.Node, carried: list[fx.Node]) -> bool:
    """Whether products compute a result from a value that these nodes show."""
    first = min(place[node] for node in carried)
    between = ir.reached(
        [result], lambda node: [n for n in node.all_input_nodes if place[n] > first]
    )
    branch = [node for node in between if node not in carried]
    products = any(ir.precision(node) is Precision.LOW for node in branch)
    return products and any(n in carried for node in branch for n in node.all_input_nodes)


def _carried(stream: fx.Node) -> Iterator[fx.Node]:
    """The value, and what it shows or only scales: views, a dropout."""
    yield stream
    while ir.precision(stream) is Precision.FOLLOW and len(stream.all_input_nodes) == 1:
        (stream,) = stream.all_input_nodes
        yield stream
