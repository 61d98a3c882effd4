"""What `print(report)` shows: what went wrong, then the numbers that explain it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rich.text import Text

from ..observe.numbers import Shares
from ..plans.grid import Grid, Part
from ..plans.node_text import short, style
from .report_data import NodeNumbers, ReportData

WORST = 8  # rows of a table
FATES = ("become zero", "subnormal", "overflow")


def parts(report: ReportData) -> Iterator[Part]:
    """The text of a report, part by part; none depends on the width of a terminal."""
    yield Text(f"{report.model}, {report.level} {report.dtype} on {report.device}", style="bold")
    yield _losses(report)
    yield f"loss scale: {number(report.scale)}; {scale_note(report)}"
    yield ""
    yield from _faults(report)
    for note in report.notes:
        yield f"note: {note}"
    for table in (_errors, _shares, _updates):
        yield from table(report)


def scale_note(report: ReportData) -> str:
    """The largest scale that would fit, in words."""
    if report.dtype == "float16" and not math.isfinite(report.losses["low"]):
        return "no scale makes a forward finite"
    if report.suggested_scale is not None:
        return f"the largest power of two that fits: {report.suggested_scale:g}"
    if report.dtype == "float16":
        return "no gradient above zero is stored in float16, so every scale fits"
    return f"{report.dtype} has the range of FP32"


def number(scale: float | None) -> str:
    return "none" if scale is None else f"{scale:g}"


def percent(share: float) -> str:
    """`0.5` -> `"50.00%"`; what would be rounded to 0.00% shows as less than 0.01%."""
    return "<0.01%" if 0 < share < 1e-4 else f"{share:.2%}"


def relative(error: float | None) -> str:
    """`0.00052` -> `"5.2e-04"`; a dash for an error that isn't known."""
    return "-" if error is None else f"{error:.1e}"


def _losses(report: ReportData) -> Grid:
    names = {"low": report.dtype, "fp32": "in FP32", "fp64": "in FP64"}
    grid = Grid(("", *(names[side] for side in report.losses)))
    grid.add("loss", *(f"{loss:.6g}" for loss in report.losses.values()))
    return grid


def _faults(report: ReportData) -> Iterator[Part]:
    if not report.faults:
        finite = math.isfinite(report.losses["low"])
        looked = not report.graphs or any(graph.left is None for graph in report.graphs)
        text = "no fault found" if finite else "the loss is not finite, but no operator made it so"
        text = text if looked else "nothing was looked at: no graph was rewritten"
        yield Text(text, style="green" if finite and looked else "bold red")
    for fault in report.faults:
        head, *rest = str(fault).splitlines()
        yield Text(head, style="bold red")
        yield from rest
    yield ""


def _errors(report: ReportData) -> Iterator[Part]:
    worst = _worst(report, lambda n: n.error or 0.0)
    if worst:
        yield "largest errors of values, relative to their norm in FP64:"
        grid = Grid(("here", "in FP32", "node", "op", "result", "module", "source"), indent=4)
        for n in worst:
            node, errors = n.node, (relative(n.error), relative(n.error_fp32))
            names = node.name, short(node.op), node.planned, node.module, node.source
            grid.add(*errors, *names, style=style(node))
        yield grid
        yield ""


def _shares(report: ReportData) -> Iterator[Part]:
    rows = {"all values": report.value_shares, "all gradients": report.gradient_shares}
    if not any(shares.count for shares in rows.values()):
        return
    scaled = "" if report.scale is None else f", gradients times the loss scale {report.scale:g}"
    yield f"what {report.dtype} makes of the numbers that are stored in it and not zero{scaled}:"
    grid = Grid((*FATES, "elements", "node", "module", "source"), indent=4)
    for name, shares in rows.items():
        grid.add(*_cells(shares), name, "", "", style="bold")
    kinds: tuple[tuple[str, Callable[[NodeNumbers], Shares | None]], ...] = (
        ("", lambda n: n.shares),
        ("gradient of ", lambda n: n.gradient_shares),
    )
    for prefix, shares_of in kinds:
        for n in _worst(report, lambda n, of=shares_of: _lost(of(n))):  # type: ignore[misc]
            found, node = shares_of(n), n.node
            assert found is not None
            names = prefix + node.name, node.module, node.source
            grid.add(*_cells(found), *names, style=style(node))
    yield grid
    yield ""


def _lost(shares: Shares | None) -> float:
    """How bad a node's shares are: what is gone counts, before what has fewer bits."""
    if shares is None:
        return 0.0
    return shares.flushed + shares.overflowed + 1e-3 * shares.subnormal


def _cells(shares: Shares) -> tuple[str, ...]:
    kinds = (shares.flushed, shares.subnormal, shares.overflowed)
    return *(f"{percent(kind):>7}" for kind in kinds), str(shares.count)


def _updates(report: ReportData) -> Iterator[Part]:
    stalled = sorted((u for u in report.updates if u.stalls), key=lambda u: -u.stalls)[:WORST]
    if stalled:
        yield (
            f"updates by {report.optimizer} that would not move a weight stored in {report.dtype} "
            "(FP32 master weights do move):"
        )
        grid = Grid(("elements", "median |update| / |weight|", "parameter"), indent=4)
        for update in stalled:
            grid.add(f"{percent(update.stalls):>7}", relative(update.ratio), update.parameter)
        yield grid


def _worst(report: ReportData, badness: Callable[[NodeNumbers], float]) -> list[NodeNumbers]:
    found = sorted((n for n in report.nodes if badness(n)), key=lambda n: -badness(n))
    return found[:WORST]
