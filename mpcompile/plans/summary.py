"""What `print(plan)` shows: a verdict, the products, the other operators; alike lines stand once.

Casts, pads, what scales gradients, values as captured and the backward are in `plan.full()`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .graph_data import GraphData, PlanNode
from .grid import STYLES, Grid, Part, scaled
from .node_text import dtype_word, runs_in, short, types
from .tensor_cores import TensorCoreOp

_LISTED = 3  # reasons of the verdict


def verdict(title: str, graphs: Sequence[GraphData]) -> Iterator[str]:
    """How many products run low, and why the others don't."""
    found = [one for graph in graphs for one in _products_of(graph)]
    hidden = sum(node.products for graph in graphs for node in graph.nodes)
    if not found and not hidden:
        yield f"{title}: no matrix product"
        return
    low = [one for one in found if one.is_low]
    total = sum(one.op.flops for one in found)
    lows = (one.node.low or one.dtype for one in low)
    words = dict.fromkeys(map(dtype_word, lows)) or dict.fromkeys(
        dtype_word(graph.dtype) for graph in graphs if not graph.left
    )
    head = f"{title}: {len(low)} of {len(found) + hidden} products in "
    head += "/".join(words) or "FP32"
    if total:
        head += f", {sum(one.op.flops for one in low) / total:.1%} of {scaled(total, 'FLOP', 1)}"
    yield head
    if hidden:
        yield f"  in FP32: {hidden} in calls whose bodies are not rewritten"
    yield from _why_fp32([one for one in found if not one.is_low])


def _why_fp32(products: Sequence[_Product]) -> Iterator[str]:
    """Products of one reason in one line, the costliest first."""
    reasons: dict[str, list[_Product]] = {}
    for one in sorted(products, key=lambda one: -one.op.flops):
        reasons.setdefault(one.why, []).append(one)
    for why, alike in list(reasons.items())[:_LISTED]:
        names = list(dict.fromkeys(one.place for one in alike))
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        yield f"  in FP32: {', '.join(names[:_LISTED])}{more}: {why}"
    if len(reasons) > _LISTED:
        yield f"  in FP32: {sum(map(len, list(reasons.values())[_LISTED:]))} for other reasons"


def graph(graph: GraphData, *, units: bool) -> Iterator[Part]:
    """The products of one graph, then its other operators.

    Args:
        units: whether the device has units whose sizes matter (Tensor Cores).
    """
    products = list(_products_of(graph))
    own = {one.node.name for one in products}
    if products:
        yield _product_grid(products, graph.dtype, units=units)
    others = [n for n in graph.nodes if n.name not in own and _is_decided(n)]
    if others:
        yield ""
        yield _other_grid(others, graph.dtype)
    if units:
        yield from graph.tensor_cores.advice


# -- products --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    node: PlanNode
    op: TensorCoreOp
    dtype: str

    @property
    def is_low(self) -> bool:
        return self.node.precision == "LOW"

    @property
    def place(self) -> str:
        return self.node.module or self.node.source or self.node.name

    @property
    def why(self) -> str:
        """Why it is not low: without the reason why its operator would be."""
        return self.node.reason.rsplit("; but ", 1)[-1]


def _products_of(graph: GraphData) -> Iterator[_Product]:
    nodes = {node.name: node for node in graph.nodes}
    ops = [op for op in graph.tensor_cores.ops if op.name in nodes]
    return (_Product(nodes[op.name], op, graph.dtype) for op in ops)


def _product_grid(products: Iterable[_Product], dtype: str, *, units: bool) -> Grid:
    heads = ("products", "line", "runs in", "FLOPs", "sizes", "why")
    rows = _Rows(heads if not units else (*heads[:3], "Tensor Cores", *heads[3:]))
    for one in products:
        what = runs_in(one.node, dtype)
        aligned = ("yes" if one.op.eligible else "no",) if units else ()
        note = one.op.reason if one.is_low and units else "" if one.is_low else one.why
        rows.add(
            one.place,
            one.node.source,
            what,
            *aligned,
            scaled(one.op.flops, "FLOP", 1),
            one.op.sizes,
            note,
            style=STYLES.get(one.node.precision, ""),
        )
    return rows.grid()


# -- other operators -------------------------------------------------------------------------------


def _is_decided(node: PlanNode) -> bool:
    """Whether it computes in a precision that somebody chose."""
    return not node.is_added and node.precision in ("LOW", "FULL")


def _other_grid(nodes: Iterable[PlanNode], dtype: str) -> Grid:
    rows = _Rows(("other operators", "line", "op", "runs in", "type", "why"))
    for node in nodes:
        rows.add(
            node.module or "-",
            node.source,
            short(node.op),
            runs_in(node, dtype),
            types(node),
            node.reason,
            style=STYLES.get(node.precision, ""),
        )
    return rows.grid()


class _Rows:
    """Rows of a grid; those that differ in the numbers of their modules alone are one row."""

    def __init__(self, heads: tuple[str, ...]) -> None:
        self._heads = heads
        self._rows: dict[tuple[str, ...], tuple[list[str], str]] = {}

    def add(self, place: str, *cells: str, style: str) -> None:
        key = re.sub(r"\d+", "*", place), *cells
        self._rows.setdefault(key, ([], style))[0].append(place)

    def grid(self) -> Grid:
        grid = Grid(self._heads)
        for (pattern, *cells), (places, style) in self._rows.items():
            alike = len(places) > 1
            same = len(set(places)) == 1
            place = f"{places[0] if same else pattern} ({len(places)})" if alike else places[0]
            grid.add(place, *cells, style=style)
        return grid
