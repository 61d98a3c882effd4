"""Magnitudes of activation gradients over a training in FP32, as in the paper's figure 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.harness.report import Table
from mpcompile.diagnosis import diagnose
from mpcompile.diagnosis.histogram import RANGES, Chart, chart_of

from .task import Task
from .ways import FP32, trainer_for

__all__ = ["LOOKS", "Histogram", "chart", "look", "table"]

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


def chart(histogram: Histogram, scale: float | None = None) -> Chart:
    """In percent of all elements that are not zero."""
    return chart_of(histogram.counts, 0, scale)


def table(histograms: Mapping[str, Histogram], scales: Mapping[str, Sequence[float]]) -> Table:
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
