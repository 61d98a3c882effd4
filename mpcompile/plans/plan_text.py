"""A plan as text: in short (`print(plan)`), or node by node with the backward (`plan.full()`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..devices.cuda import AbsentGPU
from ..ir import SHORT
from . import graph_text, summary
from .grid import Part, scaled
from .plan_data import PlanData


def parts(plan: PlanData) -> Iterator[Part]:
    """The text of a plan in short, part by part."""
    yield from verdict(plan)
    yield f"on {_where(plan)}"
    for number, graph in enumerate(plan.graphs):
        if graph.left is None:
            yield ""
            if len(plan.graphs) > 1:
                yield f"graph {number}"
            yield from summary.graph(graph, units=has_units(plan))
    yield ""
    yield from totals(plan)


def verdict(plan: PlanData) -> Iterator[str]:
    """How many products run low, and why the others don't."""
    return summary.verdict(f"{plan.model} at {plan.level}", plan.graphs)


def full_parts(plan: PlanData) -> Iterator[Part]:
    """The text of a plan node by node, casts and the backward included."""
    yield _where(plan)
    for number, graph in enumerate(plan.graphs):
        if graph.left is None:
            number_text = f", graph {number}" if len(plan.graphs) > 1 else ""
            yield from graph_text.full_parts(graph, number_text, units=has_units(plan))
            yield ""
    yield from totals(plan)


def has_units(plan: PlanData) -> bool:
    """Whether sizes matter to the device's units for products."""
    return plan.gpu is not None or graph_text.has_units(plan.device)


def _where(plan: PlanData) -> str:
    if plan.gpu is None:
        return plan.device
    return f"{plan.gpu.name}; Tensor Cores: {AbsentGPU(plan.gpu).units()}"


def totals(plan: PlanData) -> Iterator[str]:
    """What holds for all graphs together, and what is not known."""
    shares = plan.tensor_cores
    yield f"Casts: {plan.casts}"
    yield from graph_text.verified(plan.graphs)
    if shares.ops and has_units(plan):
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


def shortened(names: Sequence[str], most: int = 4) -> str:
    """`"a, b, c, d and 3 more"`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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
