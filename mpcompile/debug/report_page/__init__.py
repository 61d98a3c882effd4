"""A report as one HTML file, which a browser shows without a network: the look of a plan's page.

`report.html` is the template. Faults, losses and the histogram (`svg.py`) are plain HTML; the
tables of nodes and of weight updates are made by `report.js` of the JSON that goes in (`data.py`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ...inspect.page.data import dtype_word
from ...inspect.page.file import HERE, rendered, write_page
from ..histogram import chart_of
from ..report_text import number, percent, scale_note
from .data import data_of
from .svg import drawing_of

if TYPE_CHECKING:
    from ..report import Report

__all__ = ["render", "write"]

_FOLDER = Path(__file__).parent


def write(report: Report, path: str | Path) -> None:
    """Write the page of a report.

    Raises:
        MPCompileError: the file can't be written.
    """
    write_page(render(report), path, "report")


def render(report: Report) -> str:
    """The page of a report; the same text for the same report."""
    drawn = any(report.histogram) or report.zeros
    chart = chart_of(report.histogram, report.zeros, report.scale) if drawn else None
    data = data_of(report)
    return rendered(
        _FOLDER / "report.html",
        styles=[HERE / "page.css", _FOLDER / "report.css"],
        scripts=[HERE / "elements.js", _FOLDER / "tables.js", _FOLDER / "report.js"],
        report=report,
        data=data,
        low=dtype_word(report.dtype),
        finite=math.isfinite(report.losses["low"]),
        places=[_place(report, fault.graph, fault.node.name) for fault in report.faults],
        shares={"values": report.value_shares, "gradients": report.gradient_shares},
        scale_note=scale_note(report),
        number=number,
        percent=percent,
        chart=chart,
        drawings=[drawing_of(chart, panel) for panel in chart.panels] if chart else [],
    )


def _place(report: Report, graph: int, name: str) -> int | None:
    """Where a node is in the table; None for one without numbers."""
    places = (i for i, n in enumerate(report.nodes) if (n.graph, n.node.name) == (graph, name))
    return next(places, None)
