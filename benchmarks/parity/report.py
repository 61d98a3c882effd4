"""Mixed precision against the spread of the FP32 seeds: the rule, verdicts and tables."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.harness.report import Report, Table, plain

from .tasks import Task
from .training import FP32, Outcome

__all__ = ["deviations", "make_report"]


def make_report(
    name: str,
    notes: Sequence[str],
    tasks: Sequence[Task],
    results: Mapping[str, dict[str, list[Outcome]]],
    record: Mapping[str, str],
) -> Report:
    """The whole report; `record` says what was measured on, as `environment` does."""
    compared = {task.name: _compare(task, results[task.name]) for task in tasks}
    return Report(
        name=name,
        title="Training parity with FP32",
        notes=notes,
        tables=[
            table
            for task in tasks
            for table in (compared[task.name].table, _scale_table(task, results[task.name]))
        ],
        verdicts={
            f"{name}, {arm}: within the spread of the FP32 seeds": held
            for name, comparison in compared.items()
            for arm, held in comparison.held.items()
        },
        data={"runs": plain(results)},
        environment=record,
    )


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """A task's table, and for each mixed precision whether every metric passes the rule."""

    table: Table
    held: dict[str, bool]


def _compare(task: Task, results: dict[str, list[Outcome]]) -> _Comparison:
    rows: list[tuple[str, ...]] = []
    held = {arm: True for arm in results if arm != FP32}
    for metric in results[FP32][0].metrics:
        full = [outcome.metrics[metric] for outcome in results[FP32]]
        spread = max(max(full) - min(full), task.grains.get(metric, 0.0))
        for arm, outcomes in results.items():
            values = [outcome.metrics[metric] for outcome in outcomes]
            mean, paired = deviations(full, values)
            offs = ("-", "-", f"{spread:.4f}")
            if arm != FP32:
                offs = (f"{mean:+.4f}", f"{paired:+.4f}", "")
                held[arm] &= abs(mean) <= spread and abs(paired) <= spread
            seeds = " ".join(f"{value:.4f}" for value in values)
            rows.append((metric, arm, f"{statistics.fmean(values):.4f}", seeds, *offs))
    columns = ("metric", "precision", "mean", "seeds", "off the mean", "off the seed", "S")
    return _Comparison(Table(task.name, columns, rows), held)


def _scale_table(task: Task, results: dict[str, list[Outcome]]) -> Table:
    rows = [
        (
            arm,
            " ".join(f"{outcome.loss_scale:g}" for outcome in outcomes),
            " ".join(str(outcome.skipped_steps) for outcome in outcomes),
        )
        for arm, outcomes in results.items()
        if outcomes[0].loss_scale is not None
    ]
    columns = ("precision", "final loss scale, by seed", "skipped steps, by seed")
    return Table(f"{task.name}: loss scaling", columns, rows)


def deviations(full: list[float], mixed: list[float]) -> tuple[float, float]:
    """(mean of `mixed` less that of `full`; the difference of the pair that differs most)."""
    pairs = [b - a for a, b in zip(full, mixed, strict=True)]
    return statistics.fmean(pairs), max(pairs, key=abs)
