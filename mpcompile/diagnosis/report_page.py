"""The page of a report: that of its graphs' plans, with faults, losses, histogram and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..devices.registry import capabilities
from ..observe.numbers import Shares
from ..plans.node_text import dtype_word
from ..plans.page import app, of_plan
from ..plans.page.app import Note, Tile
from .histogram import chart_of
from .histogram_svg import drawing_of
from .report_data import ReportData
from .report_text import number, percent, scale_note

_VIEWS = {"numbers": "Nodes", "updates": "Weight updates"}


def render(report: ReportData) -> str:
    """The page of a report; the same text for the same report."""
    drawn = any(report.histogram) or report.zeros
    chart = chart_of(report.histogram, report.zeros, report.scale) if drawn else None
    page = app.Page(
        model=report.model,
        about="what its numbers do",
        facts={"level": report.level, "low dtype": report.dtype, "device": report.device},
        views={**_VIEWS, "decisions": "Decisions", "graph": "Before and after"},
        data=_data(report),
        tiles=tuple(_tiles(report)),
        notes=[Note("Not found out", report.notes, warns=True)],
        numbers={
            "faults": report.faults,
            "finite": math.isfinite(report.losses["low"]),
            "drawings": [drawing_of(chart, panel) for panel in chart.panels] if chart else [],
        },
    )
    return app.html(page)


def _tiles(report: ReportData) -> Iterator[Tile]:
    low = dtype_word(report.dtype)
    losses = {side: f"{loss:.6g}" for side, loss in report.losses.items()}
    others = [f"in {side.upper()} {loss}" for side, loss in losses.items() if side != "low"]
    yield Tile(f"Loss in {low}", losses["low"], ", ".join(others))
    yield Tile("Loss scale", number(report.scale), scale_note(report))
    yield _lost(low, "values", report.value_shares)
    yield _lost(low, "gradients", report.gradient_shares)


def _lost(low: str, what: str, found: Shares) -> Tile:
    title = f"{low} {what} that become zero"
    if not found.count:
        return Tile(title, "none", f"none are stored in {low}")
    others = f"subnormal {percent(found.subnormal)}, overflow {percent(found.overflowed)}"
    return Tile(title, percent(found.flushed), f"{others}, of {found.count} that are not zero")


def _data(report: ReportData) -> dict[str, Any]:
    data = of_plan.data_of(
        report.dtype, report.graphs, units=capabilities(report.device).wants_alignment
    )
    plain = report.to_dict()
    numbers = {(n["graph"], n["node"]): n for n in plain["nodes"]}
    for index, graph in enumerate(data["graphs"]):
        for node in graph["nodes"]:
            node["numbers"] = numbers.get((index, node["name"]))
            node["faults"] = [
                f"{fault.kind.value}: {fault.reason}"
                for fault in report.faults
                if (fault.graph, fault.node.name) == (index, node["name"])
            ]
    return {**data, "updates": plain["updates"]}
