"""The plan of one graph as text: in short (`print(plan)`), or node by node (`plan.full()`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..devices.registry import capabilities
from . import summary
from .graph_data import GraphData
from .grid import Grid, Part
from .node_text import node_grid, short

__all__ = ["full_parts", "has_units", "parts", "verified"]


def parts(graph: GraphData) -> Iterator[Part]:
    """The text of a graph in short, part by part."""
    if graph.left is not None:
        yield f"{graph.level} {graph.dtype} on {graph.device}: left in FP32: {graph.left}"
        return
    yield from summary.verdict(f"{graph.level} on {graph.device}", [graph])
    yield ""
    yield from summary.graph(graph, units=has_units(graph.device))
    yield ""
    yield f"Casts: {graph.casts}"
    yield from verified([graph])


def verified(graphs: Iterable[GraphData]) -> Iterator[str]:
    """What is known of the code that these graphs were compiled to."""
    for graph in graphs:
        if graph.verification is not None and (text := graph.verification.text()):
            yield f"Compiled code: {text}"


def full_parts(graph: GraphData, number: str = "", *, units: bool) -> Iterator[Part]:
    """The text of a rewritten graph node by node, casts and the backward included.

    Args:
        number: behind the device in the first line.
        units: whether the device has units whose sizes matter (Tensor Cores).
    """
    yield graph.head(number)
    if graph.nodes:
        yield node_grid(graph.nodes, graph.dtype)
    if units:
        yield str(graph.tensor_cores)
    yield from _backward(graph)


def has_units(device: str) -> bool:
    """Whether sizes matter to the device's units for products."""
    return capabilities(device).wants_alignment


def _backward(graph: GraphData) -> Iterator[Part]:
    """The backward of one graph, if the plan has it."""
    if graph.backward:
        again = sum(node.recomputed for node in graph.backward)
        yield f"backward: {len(graph.backward)} operators" + (
            f", {again} of them compute a value of the forward again" if again else ""
        )
        grid = Grid(("node", "op", "result", "of", "recomputed"), indent=2)
        for node in graph.backward:
            recomputed = "recomputed" if node.recomputed else ""
            grid.add(node.name, short(node.op), node.result, node.forward, recomputed)
        yield grid
