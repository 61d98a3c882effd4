"""The report: verdicts by the rule, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.report import Report, Table, plain

from .rule import compare
from .tasks import Task
from .training import FP32, Outcome

__all__ = ["make_report"]


def make_report(
    name: str,
    notes: Sequence[str],
    tasks: Sequence[Task],
    results: Mapping[str, dict[str, list[Outcome]]],
    record: Mapping[str, str],
) -> Report:
    """The whole report; `record` says what was measured on, as `environment` does."""
    compared = {
        task.name: compare(task.name, FP32, results[task.name], task.grains) for task in tasks
    }
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
