"""The top of the page: numbers, charts, and sentences that hold for the whole model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import ir
from ..plan_text import outside
from .data import dtype_word, precision_of_dtype

if TYPE_CHECKING:
    from ..plan import Plan


@dataclass(frozen=True)
class Tile:
    """One number, what it is, and what to know about it."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Part:
    """One part of a bar: `precision` gives its colour; `amount` is its length, `shown` as text."""

    label: str
    precision: str
    amount: float
    shown: str


@dataclass(frozen=True)
class Chart:
    """Stacked bars: title of the chart, and label -> the parts of each bar."""

    title: str
    bars: dict[str, list[Part]]


@dataclass(frozen=True)
class Note:
    """Sentences under a title; `warns` if the user should look at them."""

    title: str
    lines: tuple[str, ...]
    warns: bool = False


def tiles_of(plan: Plan) -> list[Tile]:
    """The numbers of the plan."""
    report, graphs = plan.tensor_cores, len(plan.graphs)
    flops = sum(op.flops for op in report.ops)
    share = f"{report.share_before:.1%} → {report.share:.1%}" if report.ops else "none"
    copied = sum(one.bytes for one in plan.saved if one.copied)
    return [
        Tile("Graphs", str(graphs), f"left in FP32: {len(plan.left)}; breaks: {len(plan.breaks)}"),
        Tile("Casts", str(plan.casts), "added by the passes or the program's own"),
        Tile(
            "FLOPs eligible for Tensor Cores",
            share,
            f"as captured → as compiled; products: {len(report.ops)}, {_scaled(flops, 'FLOP')}",
        ),
        Tile(
            "Saved for the backward",
            _size(plan.saved_bytes) if plan.saved else "none",
            f"{_size(copied)} of it copies of weights and inputs" if copied else "",
        ),
    ]


def charts_of(plan: Plan) -> list[Chart]:
    """Nodes by precision, FLOPs by eligibility, and saved bytes by dtype."""
    nodes = Counter(node.precision for node in plan.nodes if not node.is_added)
    words = {
        "LOW": f"LOW, {dtype_word(plan.dtype)}",
        "FULL": "FULL, FP32",
        "KEEP": "KEEP, as captured",
    }
    charts = [
        Chart(
            "Operators by precision",
            {"": [Part(words[p], p, nodes[p], str(nodes[p])) for p in words if nodes[p]]},
        )
    ]
    ops = plan.tensor_cores.ops
    if total := sum(op.flops for op in ops):
        captured = sum(op.flops for op in ops if op.eligible_before) / total
        compiled = sum(op.flops for op in ops if op.eligible) / total
        bars = {"as captured": _eligible(captured), "as compiled": _eligible(compiled)}
        charts.append(Chart("FLOPs of matrix products", bars))
    by_dtype: Counter[str] = Counter()
    for one in plan.saved:
        by_dtype[ir.SHORT.get(one.dtype, str(one.dtype))] += one.bytes
    if by_dtype:
        saved = [
            Part(name, precision_of_dtype(name), count, _size(count))
            for name, count in by_dtype.most_common()
        ]
        charts.append(Chart("Bytes saved for the backward, by dtype", {"": saved}))
    return charts


def _eligible(share: float) -> list[Part]:
    parts = [
        Part("eligible for Tensor Cores", "LOW", share, f"{share:.1%}"),
        Part("not eligible", "FULL", 1 - share, f"{1 - share:.1%}"),
    ]
    return [part for part in parts if part.amount]


def notes_of(plan: Plan) -> list[Note]:
    """What has to be said in words; no note without lines."""
    unknown = plan.to_dict()["unknown"]
    notes = [
        Note("Graphs left in FP32", plan.left, warns=True),
        Note("Graph breaks", plan.breaks, warns=True),
        Note("Outside of the graphs", (outside(plan),) if plan.outside else (), warns=True),
        Note("Repairs", plan.repairs, warns=True),
        Note("Sizes worth changing", plan.tensor_cores.advice),
        Note("Not known without the GPU", tuple(unknown)),
    ]
    return [note for note in notes if note.lines]


def _size(count: int) -> str:
    return _scaled(count, "B")


def _scaled(count: int, unit: str) -> str:
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {prefix}{unit}"
    return f"{count} {unit}"
