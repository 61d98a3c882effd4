"""The table of the papers' claims, with what is behind each cell."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.harness.report import Report, Table, plain
from benchmarks.harness.ways import trainer_for
from benchmarks.papers import again as second
from benchmarks.papers.rows import Kept, Row
from benchmarks.papers.rule import Comparison, compare
from benchmarks.papers.task import FP32, QUALITY, UNSCALED, Outcome, Task
from mpcompile.diagnosis import diagnose
from mpcompile.diagnosis.histogram import RANGES, HistogramChart, chart_of

OFF = " (off)"
"""After a value that the rule does not pass."""


def make_report(
    notes: Sequence[str],
    tasks: Sequence[Task],
    kept: Mapping[str, Kept],
    again: Mapping[str, Kept],
    histograms: Mapping[str, Histogram],
) -> Report:
    """The whole report.

    Args:
        kept: a row for each task, by its name.
        again: what was off in them, trained from all seeds.
        histograms: of activation gradients, by the name of a task.
    """
    rows = {name: row.runs for name, row in kept.items()}
    compared = {
        task.name: compare(task.name, FP32.name, rows[task.name], task.grains) for task in tasks
    }
    return Report(
        title="The papers' claims: mixed precision against FP32, no hyperparameter changed",
        notes=notes,
        tables=[
            _summary(tasks, rows, compared),
            magnitudes(histograms, {name: _ends(rows[name]) for name in histograms}),
            *in_detail(tasks, rows, compared),
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
    )


def in_detail(
    tasks: Sequence[Task], rows: Mapping[str, Row], compared: Mapping[str, Comparison]
) -> list[Table]:
    """Of each task: every metric under each way, then the loss scales."""
    return [
        table
        for task in tasks
        for table in (compared[task.name].table, _scales(task, rows[task.name]))
    ]


def _summary(
    tasks: Sequence[Task], rows: Mapping[str, Row], compared: Mapping[str, Comparison]
) -> Table:
    """A line for each task: the mean of its metric under each way."""
    lines = []
    for task in tasks:
        cells, held = [_cell(task, rows[task.name][FP32.name])], compared[task.name].held
        for way in QUALITY[1:]:
            runs, off = rows[task.name].get(way.name), "" if held.get(way.name, True) else OFF
            cells.append(_cell(task, runs) + off if runs else "-")
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


# -- histograms ------------------------------------------------------------------------------------
# Magnitudes of activation gradients over a training in FP32, as in the paper's figure 3.

LOOKS = 5
"""How often a training is looked at, in equal spans of its steps."""


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Over all looks at a training.

    Attributes:
        counts: elements by binary exponent, as in a `Report` of `diagnose`.
        zeros: elements that are zero in FP64.
    """

    counts: list[int]
    zeros: int


def look(task: Task, device: torch.device, steps: int | None = None) -> Histogram:
    """Train in eager FP32 from seed 0, and diagnose steps on the way."""
    torch.manual_seed(0)
    training: Any = task.start(trainer_for(FP32, "eager", device), 0)
    span = max(1, (steps or task.steps) // LOOKS)
    reports = []
    for _ in range(LOOKS):
        for _ in range(span):
            training.step()
        probe = training.probe()
        options = {"dtype": torch.float16, "level": "O2"}
        reports.append(diagnose(probe.model, *probe.inputs, loss_fn=probe.loss, **options))
    counts = [sum(column) for column in zip(*(r.histogram for r in reports), strict=True)]
    return Histogram(counts, sum(report.zeros for report in reports))


def chart(histogram: Histogram, scale: float | None = None) -> HistogramChart:
    """In percent of all elements that are not zero."""
    return chart_of(histogram.counts, 0, scale)


def magnitudes(histograms: Mapping[str, Histogram], scales: Mapping[str, Sequence[float]]) -> Table:
    """What FP16 makes of the gradients, as they are and times a loss scale.

    Args:
        scales: of each task, where its trainings at O2 ended, by seed.
    """
    lines = []
    for name, histogram in histograms.items():
        zeros = 100 * histogram.zeros / (histogram.zeros + sum(histogram.counts))
        panels = chart(histogram, min(scales[name])).panels
        for factor, panel in zip((1.0, min(scales[name])), panels, strict=False):
            shares = (f"{panel.percent(one.name):.3g}%" for one in RANGES)
            lines.append((name, f"{factor:g}", f"{zeros:.1f}%", *shares))
    columns = ("task", "times", "zero anyway, of all", *(one.name for one in RANGES))
    return Table("Activation gradients in FP16, of those that are not zero", columns, lines)
