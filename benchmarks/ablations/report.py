"""Verdicts, tables, and a report with a figure."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.report import RESULTS, Report, Table, plain

from .figure import draw
from .fp16 import Magnitudes
from .training import FP32, HALF_WEIGHTS, MASTERS, SCALES, UNSCALED, Results

__all__ = ["make_report", "scaled_verdicts", "stored_verdicts"]

FIGURES = RESULTS.parent.parent / "docs" / "figures"


@dataclasses.dataclass(frozen=True)
class _Illustrated(Report):
    """A report with a figure; the one of the committed numbers lies in the documentation."""

    draw: Callable[[Path], object]

    def write(self, directory: Path) -> list[Path]:
        figure = (FIGURES if directory == RESULTS else directory) / "ablations.svg"
        figure.parent.mkdir(parents=True, exist_ok=True)
        self.draw(figure)
        return [*super().write(directory), figure]


def make_report(
    name: str,
    notes: Sequence[str],
    stored: Results,
    scaled: Results,
    gradients: Magnitudes,
    record: Mapping[str, str],
) -> Report:
    """The whole report; `record` says what was measured on, as `environment` does.

    Args:
        stored, scaled: the outcomes of the first and of the second ablation.
        gradients: those of all layers' outputs, in the FP32 runs of the second.
    """
    return _Illustrated(
        name=name,
        title="What master weights and loss scaling are for",
        notes=notes,
        tables=[
            _table("Without master weights", stored),
            _table("Without loss scaling", scaled),
            _lost_table(gradients),
        ],
        verdicts={**stored_verdicts(stored), **scaled_verdicts(scaled)},
        data={
            "master weights": plain(stored),
            "loss scaling": plain(scaled),
            "activation gradients, share by octave": gradients.shares(),
        },
        environment=record,
        draw=functools.partial(draw, stored=stored, scaled=scaled, gradients=gradients.shares()),
    )


def _table(title: str, results: Results) -> Table:
    names = list(results[FP32][0].shares)
    rows = [
        (
            arm,
            f"{statistics.fmean(outcome.before for outcome in outcomes):.4f}",
            " ".join(f"{outcome.after:.4f}" for outcome in outcomes),
            *(f"{statistics.fmean(o.shares[name] for o in outcomes):.1%}" for name in names),
            " ".join(str(outcome.skipped_steps) for outcome in outcomes),
        )
        for arm, outcomes in results.items()
    ]
    columns = ("arm", "loss before", "loss after, by seed", *names, "skipped steps")
    return Table(title, columns, rows)


def _lost_table(gradients: Magnitudes) -> Table:
    rows = [(f"{scale:g}", f"{gradients.lost(scale):.1%}") for scale in (1.0, 8.0, 128.0, 2.0**16)]
    return Table(
        "Gradients of layers' outputs that round to zero in FP16", ("loss scale", "share"), rows
    )


def stored_verdicts(results: Results) -> dict[str, bool]:
    """Judged by progress, the fall of the held-out loss, against the FP32 run of the same seed."""
    ratios = {
        arm: [o.progress / full.progress for o, full in zip(outcomes, results[FP32], strict=True)]
        for arm, outcomes in results.items()
    }
    return {
        f"{MASTERS}: progress within 2% of FP32's": all(0.98 < x < 1.02 for x in ratios[MASTERS]),
        f"{HALF_WEIGHTS}: less than a quarter of FP32's progress": all(
            x < 0.25 for x in ratios[HALF_WEIGHTS]
        ),
    }


def scaled_verdicts(results: Results) -> dict[str, bool]:
    """Judged by the held-out loss in the end, against the FP32 run of the same seed."""
    ratios = {
        arm: [o.after / full.after for o, full in zip(outcomes, results[FP32], strict=True)]
        for arm, outcomes in results.items()
    }
    return {
        f"{UNSCALED}: at least twice the loss of FP32": all(x > 2 for x in ratios[UNSCALED]),
        **{
            f"{arm}: loss within 10% of FP32's": all(0.9 < x < 1.1 for x in ratios[arm])
            for arm in SCALES
            if arm != UNSCALED
        },
    }
