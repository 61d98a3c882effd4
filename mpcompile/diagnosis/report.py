"""What `diagnose` found: its data, and how it is printed, stored and shown in a browser."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from .. import stored
from .._version import __version__
from ..observe.fault import Fault
from ..observe.record import EXPONENTS, Numbers, Shares
from ..planner.graph_plan import GraphPlan
from ..planner.grid import Grid, Part, Shown
from ..planner.plan_data import PlanNode
from ..planner.plan_text import dtype_word, has_units, short, style
from ..plans.page.render import data_of, html
from .histogram import RANGES, chart_of

WORST = 8  # rows of a table
FATES = ("become zero", "subnormal", "overflow")


@dataclass(frozen=True)
class NodeNumbers:
    """The numbers of one node of a rewritten graph.

    Attributes:
        graph: the number of its graph in the model's forward.
        node: its line in the plan.
        value, gradient: of its result, and of the gradient of that, loss scale included.
        error, gradient_error: by how much their finite elements are off, relative to the norm of
            the exact ones; None where none is finite, or it isn't known.
        error_fp32: the same of the value in FP32.
        shares, gradient_shares: what the low dtype makes of the exact ones; None where the value is
            stored in FP32.
        lost: the share of the gradient's elements that became zero.
    """

    graph: int
    node: PlanNode
    value: Numbers
    gradient: Numbers
    error: float | None
    error_fp32: float | None
    gradient_error: float | None
    shares: Shares | None
    gradient_shares: Shares | None
    lost: float


@dataclass(frozen=True)
class UpdateErrors:
    """How one parameter moved in an optimizer step.

    Attributes:
        parameter: its name.
        ratio: the median of |update| / |weight| over the elements that moved.
        stalls: the share (0 to 1) of these whose update is less than half a unit in the last place
            of the low dtype (2**-11 of the weight in FP16, 2**-8 in BF16): without FP32 master
            weights they would not move.
    """

    parameter: str
    ratio: float
    stalls: float


@dataclass(frozen=True)
class Report(Shown):
    """What `diagnose` found.

    Attributes:
        model, level, dtype, device: as in a `Plan`.
        faults: what went wrong, most serious first; empty if nothing did.
        losses: "low", "fp32", "fp64" -> the loss of the last step.
        scale: the loss scale that the rewritten graph ran with; None where it scales nothing.
        suggested_scale: the largest power of two with max|g| * scale < 65504 over the gradients
            that are stored in FP16; None for BF16, or without gradients.
        nodes: the numbers of each node, in the order of the graphs.
        histogram: how many elements of the exact activation gradients have the binary exponent
            `EXPONENTS[i]`, that is floor(log2 |x|); those beyond either end are counted there.
        zeros: how many more of their elements are zero.
        updates: how the parameters moved.
        optimizer: what moved them: "AdamW".
        graphs: the plans of the graphs.
        notes: what the report could not find out, one sentence each.
    """

    model: str
    level: str
    dtype: str
    device: str
    faults: tuple[Fault, ...]
    losses: dict[str, float]
    scale: float | None
    suggested_scale: float | None
    nodes: tuple[NodeNumbers, ...]
    histogram: tuple[int, ...]
    zeros: int
    updates: tuple[UpdateErrors, ...]
    optimizer: str
    graphs: tuple[GraphPlan, ...]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Fault | None:
        """The most serious fault, or None."""
        return self.faults[0] if self.faults else None

    @property
    def pins(self) -> tuple[str, ...]:
        """The nodes to keep in FP32, for `Policy(nodes=...)`."""
        return tuple(dict.fromkeys(name for fault in self.faults for name in fault.pins))

    @property
    def value_shares(self) -> Shares:
        """What the low dtype makes of all values that are stored in it."""
        return _together(n.shares for n in self.nodes)

    @property
    def gradient_shares(self) -> Shares:
        """What the low dtype makes of all gradients that are stored in it, times the loss scale."""
        return _together(n.gradient_shares for n in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the attributes, where numbers that are infinite or NaN are None.

        Beside them: "pins"; "value_shares" and "gradient_shares", over all nodes; "exponents", the
        first of the histogram and the one after its last; "versions". Of a node there is its name
        and module: "graphs" has the rest.
        """
        data = {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "faults": [{**dataclasses.asdict(f), "kind": f.kind.value} for f in self.faults],
            "pins": self.pins,
            "nodes": [
                {**dataclasses.asdict(n), "node": n.node.name, "module": n.node.module}
                for n in self.nodes
            ],
            "value_shares": dataclasses.asdict(self.value_shares),
            "gradient_shares": dataclasses.asdict(self.gradient_shares),
            "updates": [dataclasses.asdict(u) for u in self.updates],
            "graphs": [graph.to_dict() for graph in self.graphs],
            "exponents": [EXPONENTS.start, EXPONENTS.stop],
            "versions": {"mpcompile": __version__, "torch": torch.__version__},
        }
        finite: dict[str, Any] = _finite(data)
        return finite

    def save(self, path: str | Path) -> None:
        """Write `to_dict()` as JSON.

        Raises:
            MPCompileError: the file can't be written.
        """
        stored.write(json.dumps(self.to_dict(), indent=1) + "\n", path)

    def to_html(self, path: str | Path) -> None:
        """Write the report as one HTML file to read in a browser; it needs no network.

        Raises:
            MPCompileError: the file can't be written.
        """
        stored.write(render(self), path)

    def _parts(self) -> Iterator[Part]:
        yield Text(f"{self.model}, {self.level} {self.dtype} on {self.device}", style="bold")
        yield _losses(self)
        yield f"loss scale: {_number(self.scale)}; {_scale_note(self)}"
        yield ""
        yield from _faults(self)
        for note in self.notes:
            yield f"note: {note}"
        for table in (_errors, _shares, _updates):
            yield from table(self)


def _together(shares: Iterable[Shares | None]) -> Shares:
    """The shares of several nodes as one, by their numbers of elements."""
    found = [one for one in shares if one is not None]
    total = sum(one.count for one in found)
    if not total:
        return Shares()
    return Shares(
        sum(one.flushed * one.count for one in found) / total,
        sum(one.subnormal * one.count for one in found) / total,
        sum(one.overflowed * one.count for one in found) / total,
        count=total,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


# -- as text --------------------------------------------------------------------------------------


def _scale_note(report: Report) -> str:
    """The largest scale that would fit, in words."""
    if report.dtype == "float16" and not math.isfinite(report.losses["low"]):
        return "no scale makes a forward finite"
    if report.suggested_scale is not None:
        return f"the largest power of two that fits: {report.suggested_scale:g}"
    if report.dtype == "float16":
        return "no gradient above zero is stored in float16, so every scale fits"
    return f"{report.dtype} has the range of FP32"


def _number(scale: float | None) -> str:
    return "none" if scale is None else f"{scale:g}"


def _percent(share: float) -> str:
    """`0.5` -> `"50.00%"`; what would be rounded to 0.00% shows as less than 0.01%."""
    return "<0.01%" if 0 < share < 1e-4 else f"{share:.2%}"


def _relative(error: float | None) -> str:
    """`0.00052` -> `"5.2e-04"`; a dash for an error that isn't known."""
    return "-" if error is None else f"{error:.1e}"


def _losses(report: Report) -> Grid:
    names = {"low": report.dtype, "fp32": "in FP32", "fp64": "in FP64"}
    grid = Grid(("", *(names[side] for side in report.losses)))
    grid.add("loss", *(f"{loss:.6g}" for loss in report.losses.values()))
    return grid


def _without_faults(report: Report) -> tuple[str, bool]:
    """What there is to say if no fault was found, and whether all is well then."""
    if report.graphs and all(graph.left is not None for graph in report.graphs):
        return "nothing was looked at: no graph was rewritten", False
    if math.isfinite(report.losses["low"]):
        return "no fault found", True
    return "the loss is not finite, but no operator made it so", False


def _faults(report: Report) -> Iterator[Part]:
    if not report.faults:
        text, fine = _without_faults(report)
        yield Text(text, style="green" if fine else "bold red")
    for fault in report.faults:
        head, *rest = str(fault).splitlines()
        yield Text(head, style="bold red")
        yield from rest
    yield ""


def _errors(report: Report) -> Iterator[Part]:
    worst = _worst(report, lambda n: n.error or 0.0)
    if worst:
        yield "largest errors of values, relative to their norm in FP64:"
        grid = Grid(("here", "in FP32", "node", "op", "result", "module", "source"), indent=4)
        for n in worst:
            node, errors = n.node, (_relative(n.error), _relative(n.error_fp32))
            names = node.name, short(node.op), node.planned, node.module, node.source
            grid.add(*errors, *names, style=style(node))
        yield grid
        yield ""


def _shares(report: Report) -> Iterator[Part]:
    rows = {"all values": report.value_shares, "all gradients": report.gradient_shares}
    if not any(shares.count for shares in rows.values()):
        return
    scaled = "" if report.scale is None else f", gradients times the loss scale {report.scale:g}"
    yield f"what {report.dtype} makes of the numbers that are stored in it and not zero{scaled}:"
    grid = Grid((*FATES, "elements", "node", "module", "source"), indent=4)
    for name, shares in rows.items():
        grid.add(*_cells(shares), name, "", "", style="bold")
    kinds = {"": attrgetter("shares"), "gradient of ": attrgetter("gradient_shares")}
    for prefix, of in kinds.items():
        for n in _worst(report, lambda n, of=of: _lost(of(n))):  # type: ignore[misc]
            names = prefix + n.node.name, n.node.module, n.node.source
            grid.add(*_cells(of(n)), *names, style=style(n.node))
    yield grid
    yield ""


def _lost(shares: Shares | None) -> float:
    """How bad a node's shares are: what is gone counts, before what has fewer bits."""
    if shares is None:
        return 0.0
    return shares.flushed + shares.overflowed + 1e-3 * shares.subnormal


def _cells(shares: Shares) -> tuple[str, ...]:
    kinds = (shares.flushed, shares.subnormal, shares.overflowed)
    return *(f"{_percent(kind):>7}" for kind in kinds), str(shares.count)


def _updates(report: Report) -> Iterator[Part]:
    stalled = sorted((u for u in report.updates if u.stalls), key=lambda u: -u.stalls)[:WORST]
    if stalled:
        yield (
            f"updates by {report.optimizer} that would not move a weight stored in {report.dtype} "
            "(FP32 master weights do move):"
        )
        grid = Grid(("elements", "median |update| / |weight|", "parameter"), indent=4)
        for update in stalled:
            grid.add(f"{_percent(update.stalls):>7}", _relative(update.ratio), update.parameter)
        yield grid


def _worst(report: Report, badness: Callable[[NodeNumbers], float]) -> list[NodeNumbers]:
    found = sorted((n for n in report.nodes if badness(n)), key=lambda n: -badness(n))
    return found[:WORST]


# -- as a page ------------------------------------------------------------------------------------


def render(report: Report) -> str:
    """The page of a report; the same text for the same report."""
    drawn = any(report.histogram) or report.zeros
    chart = chart_of(report.histogram, report.zeros, report.scale) if drawn else None
    return html(
        model=report.model,
        about="what its numbers do",
        facts={"level": report.level, "low dtype": report.dtype, "device": report.device},
        views={
            "numbers": "Nodes",
            "updates": "Weight updates",
            "decisions": "Decisions",
            "graph": "Before and after",
        },
        data=_data(report),
        tiles=tuple(_tiles(report)),
        warnings={"Not found out": report.notes},
        numbers={
            "faults": report.faults,
            "without": _without_faults(report),
            "chart": chart,
            "panels": chart.panels if chart else (),
            "ranges": RANGES,
            "percent": _percent,
        },
    )


def _tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    low = dtype_word(report.dtype)
    losses = {side: f"{loss:.6g}" for side, loss in report.losses.items()}
    others = [f"in {side.upper()} {loss}" for side, loss in losses.items() if side != "low"]
    yield f"Loss in {low}", losses["low"], ", ".join(others)
    yield "Loss scale", _number(report.scale), _scale_note(report)
    yield _lost_tile(low, "values", report.value_shares)
    yield _lost_tile(low, "gradients", report.gradient_shares)


def _lost_tile(low: str, what: str, found: Shares) -> tuple[str, str, str]:
    title = f"{low} {what} that become zero"
    if not found.count:
        return title, "none", f"none are stored in {low}"
    others = f"subnormal {_percent(found.subnormal)}, overflow {_percent(found.overflowed)}"
    return title, _percent(found.flushed), f"{others}, of {found.count} that are not zero"


def _data(report: Report) -> dict[str, Any]:
    data = data_of(report.dtype, report.graphs, units=has_units(report.device))
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
