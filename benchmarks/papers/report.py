"""The table of the papers' claims, with what is behind each cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.report import Report, Table, plain
from benchmarks.parity.rule import Comparison, compare

from . import again as second
from .histograms import Histogram
from .histograms import table as magnitudes
from .store import Kept, Row
from .task import Task
from .training import Outcome
from .ways import FP32, QUALITY, UNSCALED

__all__ = ["make_report"]

OFF = " (off)"
"""After a value that the rule does not pass."""


def make_report(
    name: str,
    notes: Sequence[str],
    tasks: Sequence[Task],
    kept: Mapping[str, Kept],
    again: Mapping[str, Kept],
    record: Mapping[str, str],
    histograms: Mapping[str, Histogram],
) -> Report:
    """The whole report.

    Args:
        kept: a row for each task, by its name.
        again: what was off in them, trained from all seeds.
        record: what was measured on, as `environment` says it.
        histograms: of activation gradients, by the name of a task.
    """
    rows = {name: row.runs for name, row in kept.items()}
    compared = {
        task.name: compare(task.name, FP32.name, rows[task.name], task.grains) for task in tasks
    }
    return Report(
        name=name,
        title="The papers' claims: mixed precision against FP32, no hyperparameter changed",
        notes=notes,
        tables=[
            _summary(tasks, rows, compared),
            magnitudes(histograms, {name: _ends(rows[name]) for name in histograms}),
            *(
                table
                for task in tasks
                for table in (compared[task.name].table, _scales(task, rows[task.name]))
            ),
            *([second.table(kept, again)] if again else []),
        ],
        verdicts={
            **{
                f"{task.name}, {way}: within the spread of the FP32 seeds": held
                for task in tasks
                for way, held in compared[task.name].held.items()
                if way != UNSCALED.name
            },
            **second.verdicts(kept, again),
        },
        data={
            "rows": _finite(plain(kept)),
            "again": _finite(plain(again)),
            "histograms": plain(histograms),
        },
        environment=record,
    )


def _summary(
    tasks: Sequence[Task], rows: Mapping[str, Row], compared: Mapping[str, Comparison]
) -> Table:
    """A line for each task: the mean of its metric under each way."""
    lines = []
    for task in tasks:
        cells = [_cell(task, rows[task.name][FP32.name])]
        for way in QUALITY[1:]:
            off = "" if compared[task.name].held[way.name] else OFF
            cells.append(_cell(task, rows[task.name][way.name]) + off)
        spread = [outcome.metrics[task.metric] for outcome in rows[task.name][FP32.name]]
        cells[0] += f" ({_short(min(spread))} to {_short(max(spread))})"
        arrow = "higher" if task.higher else "lower"
        lines.append((f"{task.claim}: {task.name}", f"{task.metric}, {arrow}", *cells))
    columns = ("task", "metric and what is better", *(way.name for way in QUALITY))
    return Table("The table", columns, lines)


def _cell(task: Task, outcomes: Sequence[Outcome]) -> str:
    return _short(statistics.fmean(outcome.metrics[task.metric] for outcome in outcomes))


def _short(value: float) -> str:
    """Four significant digits, and no more than two after the point where it is large."""
    return f"{value:.4g}" if abs(value) < 1 else f"{value:.2f}"


def _scales(task: Task, row: Row) -> Table:
    """Of the ways with a loss scale; where a task has several models, one after the other."""
    lines = [
        (
            way,
            "; ".join(" ".join(f"{scale:g}" for scale, _ in o.scales) for o in outcomes),
            "; ".join(" ".join(str(skipped) for _, skipped in o.scales) for o in outcomes),
        )
        for way, outcomes in row.items()
        if outcomes[0].scales
    ]
    columns = ("precision", "final loss scale, by seed", "skipped steps, by seed")
    return Table(f"{task.name}: loss scaling", columns, lines)


def _ends(row: Row) -> list[float]:
    """The loss scales at the end of FP16 at O2, by seed."""
    return [scale for outcome in row["FP16 O2"] for scale, _ in outcome.scales]


def _finite(value: Any) -> Any:
    """JSON has no NaN: null stands in its place."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
