"""A plan as text: in short (`print(plan)`), or node by node with the backward (`plan.full()`).

In short there is a verdict, then of each graph the products and the other operators that compute in
a precision which was chosen; alike lines stand once. Casts, pads, what scales gradients, values as
captured and the backward are in the full text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..devices.cuda import AbsentGPU
from ..devices.gpus import GPU
from ..devices.registry import capabilities
from ..errors import shortened
from ..ir import SHORT
from ..ir.text import scaled
from .grid import ADDED, STYLES, Grid, Part
from .plan_data import GraphData, PlanData, PlanNode
from .tensor_core_report import TensorCoreOp

_LISTED = 3  # reasons of the verdict
HEADS = ("node", "op", "before -> after", "runs in", "rule", "module", "source", "reason")


def node_grid(nodes: Iterable[PlanNode], dtype: str) -> Grid:
    """One row for each node of a plan whose low dtype is `dtype`, "float16"."""
    grid = Grid(HEADS)
    for node in nodes:
        how = runs_in(node, dtype)
        what = (how, node.rule, node.module, node.source, node.reason)
        grid.add(node.name, short(node.op), types(node), *what, style=style(node))
    return grid


def runs_in(node: PlanNode, dtype: str) -> str:
    """The precision of a node in words, "FP16", in a plan whose low dtype is `dtype`."""
    low = dtype_word(node.low or dtype)
    return {"LOW": low, "FULL": "FP32", "KEEP": "as is"}.get(node.precision, node.precision)


def dtype_word(dtype: str | torch.dtype) -> str:
    """`"bfloat16"` -> `"BF16"`."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "BF").replace("float", "FP")


def types(node: PlanNode) -> str:
    """`"f32[8, 4] -> f16[8, 4]"`, or one type if they are the same."""
    if node.captured == node.planned or node.is_added:
        return node.planned
    return f"{node.captured} -> {node.planned}"


def style(node: PlanNode) -> str:
    return ADDED if node.is_added else STYLES.get(node.precision, "")


def short(op: str) -> str:
    """`"aten::linear"` -> `"linear"`, as in the lines of a graph."""
    return op.removeprefix("aten::")


def verdict(title: str, graphs: Sequence[GraphData]) -> Iterator[str]:
    """How many products run low, and why the others don't."""
    found = [one for graph in graphs for one in _products_of(graph)]
    hidden = sum(node.products for graph in graphs for node in graph.nodes)
    if not found and not hidden:
        yield f"{title}: no matrix product"
        return
    low = [one for one in found if one.is_low]
    lows = (one.node.low or one.dtype for one in low)
    words = dict.fromkeys(map(dtype_word, lows)) or dict.fromkeys(
        dtype_word(graph.dtype) for graph in graphs if not graph.left
    )
    head = f"{title}: {len(low)} of {len(found) + hidden} products in "
    head += "/".join(words) or "FP32"
    if total := sum(one.op.flops for one in found):
        head += f", {share_low(graphs):.1%} of {scaled(total, 'FLOP', 1)}"
    yield head
    if hidden:
        yield f"  in FP32: {hidden} in calls whose bodies are not rewritten"
    yield from _why_fp32([one for one in found if not one.is_low])


def share_low(graphs: Sequence[GraphData]) -> float:
    """Of the FLOPs of all products that could be rewritten the share, 0 to 1, in a low dtype."""
    found = [one for graph in graphs for one in _products_of(graph)]
    total = sum(one.op.flops for one in found)
    return sum(one.op.flops for one in found if one.is_low) / total if total else 0.0


def _why_fp32(products: Sequence[_Product]) -> Iterator[str]:
    """Products of one reason in one line, the costliest first."""
    reasons: dict[str, list[_Product]] = {}
    for one in sorted(products, key=lambda one: -one.op.flops):
        reasons.setdefault(one.why, []).append(one)
    for why, alike in list(reasons.items())[:_LISTED]:
        places = list(dict.fromkeys(one.place for one in alike))
        yield f"  in FP32: {shortened(places, most=_LISTED)}: {why}"
    if len(reasons) > _LISTED:
        yield f"  in FP32: {sum(map(len, list(reasons.values())[_LISTED:]))} for other reasons"


def _summary(graph: GraphData, *, units: bool) -> Iterator[Part]:
    """The products of one graph, then its other operators.

    Args:
        units: whether the device has units whose sizes matter (Tensor Cores).
    """
    products = list(_products_of(graph))
    own = {one.node.name for one in products}
    if products:
        yield _product_grid(products, graph.dtype, units=units)
    # those that compute in a precision which was chosen
    decided = [n for n in graph.nodes if not n.is_added and n.precision in ("LOW", "FULL")]
    if others := [n for n in decided if n.name not in own]:
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
    rows = []
    for one in products:
        aligned = ("yes" if one.op.eligible else "no",) if units else ()
        note = one.op.reason if one.is_low and units else "" if one.is_low else one.why
        cells = (*aligned, scaled(one.op.flops, "FLOP", 1), one.op.sizes, note)
        what = one.node.source, runs_in(one.node, dtype)
        rows.append((one.place, (*what, *cells), style(one.node)))
    return _grid(heads if not units else (*heads[:3], "Tensor Cores", *heads[3:]), rows)


# -- other operators -------------------------------------------------------------------------------


def _other_grid(nodes: Iterable[PlanNode], dtype: str) -> Grid:
    rows = []
    for node in nodes:
        cells = node.source, short(node.op), runs_in(node, dtype), types(node), node.reason
        rows.append((node.module or "-", cells, style(node)))
    return _grid(("other operators", "line", "op", "runs in", "type", "why"), rows)


def _grid(heads: tuple[str, ...], rows: Iterable[tuple[str, tuple[str, ...], str]]) -> Grid:
    """A grid of rows: place, other cells, style. Those that differ in the numbers of their modules
    alone are one row.
    """
    alike: dict[tuple[str, ...], tuple[list[str], str]] = {}
    for place, cells, style in rows:
        alike.setdefault((re.sub(r"\d+", "*", place), *cells), ([], style))[0].append(place)
    grid = Grid(heads)
    for (pattern, *others), (places, style) in alike.items():
        place = places[0] if len(set(places)) == 1 else pattern
        grid.add(f"{place} ({len(places)})" if len(places) > 1 else place, *others, style=style)
    return grid


# -- graphs and plans ------------------------------------------------------------------------------


def graph_parts(graph: GraphData) -> Iterator[Part]:
    """The text of one graph in short."""
    if graph.left is not None:
        yield f"{graph.level} {graph.dtype} on {graph.device}: left in FP32: {graph.left}"
    else:
        yield from verdict(f"{graph.level} on {graph.device}", [graph])
        yield ""
        yield from _summary(graph, units=has_units(graph.device))
        yield ""
        yield f"Casts: {graph.casts}"
    yield from _verified([graph])


def plan_parts(plan: PlanData) -> Iterator[Part]:
    """The text of a plan in short."""
    yield from verdict(plan.title, plan.graphs)
    yield f"on {_where(plan)}"
    for number, graph in enumerate(plan.graphs):
        if graph.left is None:
            yield ""
            if len(plan.graphs) > 1:
                yield f"graph {number}"
            yield from _summary(graph, units=has_units(plan.device, plan.gpu))
    yield ""
    yield from _totals(plan)


def full_graph_parts(graph: GraphData, number: str = "", gpu: GPU | None = None) -> Iterator[Part]:
    """The text of a rewritten graph node by node, casts and the backward included.

    Args:
        number: follows the device in the first line.
        gpu: that the plan was made for, if it isn't the device of this machine.
    """
    yield graph.head(number)
    if graph.nodes:
        yield node_grid(graph.nodes, graph.dtype)
    if has_units(graph.device, gpu):
        yield str(graph.tensor_cores)
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


def full_plan_parts(plan: PlanData) -> Iterator[Part]:
    """The text of a plan node by node, casts and the backward included."""
    yield _where(plan)
    for number, graph in enumerate(plan.graphs):
        if graph.left is None:
            number_text = f", graph {number}" if len(plan.graphs) > 1 else ""
            yield from full_graph_parts(graph, number_text, plan.gpu)
            yield ""
    yield from _totals(plan)


def has_units(device: str, gpu: GPU | None = None) -> bool:
    """Whether sizes matter to the units for products (Tensor Cores) of a device, or of a GPU."""
    return gpu is not None or capabilities(device).wants_alignment


def _verified(graphs: Iterable[GraphData]) -> Iterator[str]:
    """What is known of the code that these graphs were compiled to."""
    for graph in graphs:
        if graph.verification is not None and (text := graph.verification.text()):
            yield f"Compiled code: {text}"


def _where(plan: PlanData) -> str:
    if plan.gpu is None:
        return plan.device
    return f"{plan.gpu.name}; Tensor Cores: {AbsentGPU(plan.gpu).units()}"


def _totals(plan: PlanData) -> Iterator[str]:
    """What holds for all graphs together, and what is not known."""
    shares = plan.tensor_cores
    yield f"Casts: {plan.casts}"
    yield from _verified(plan.graphs)
    if shares.ops and has_units(plan.device, plan.gpu):
        yield f"Tensor Core share of the FLOPs: {shares.share_before:.1%} -> {shares.share:.1%}"
    for reason in plan.left:
        yield f"a graph stays in FP32: {reason}"
    for reason in plan.breaks:
        yield f"graph break: {reason}"
    if plan.outside:
        yield outside(plan)
    for event in plan.repairs:
        yield f"repaired: {event}"
    yield _saved(plan)
    if unknown := plan.unknown:
        yield "\n".join(["Not known without the GPU:", *(f"  {line}" for line in unknown)])


def outside(plan: PlanData) -> str:
    """What runs outside of the graphs, in one line."""
    names = shortened([line.path or plan.model for line in plan.outside])
    share = 1 - plan.share_in_graphs
    return f"outside of the graphs, in FP32: {names} ({share:.1%} of the product FLOPs)"


def _saved(plan: PlanData) -> str:
    notes = [f"{name} {scaled(count, 'B')}" for name, count in bytes_by_dtype(plan).items()]
    if copied := sum(one.bytes for one in plan.saved if one.copied):
        notes.append(f"of it copies of weights and other inputs {scaled(copied, 'B')}")
    text = f"Saved for the backward: {scaled(plan.saved_bytes, 'B')}"
    return text + (f" ({', '.join(notes)})" if notes else "")


def bytes_by_dtype(plan: PlanData) -> dict[str, int]:
    """Dtype, as `"f16"` -> bytes that are kept for the backward."""
    counts: Counter[str] = Counter()
    for one in plan.saved:
        counts[SHORT.get(one.dtype, str(one.dtype))] += one.bytes
    return dict(counts)
