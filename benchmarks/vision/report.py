"""The zoo's report, with what torchvision's models have beyond it: sizes, frames, another peer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.report import Report, Table
from benchmarks.zoo import report as zoo
from benchmarks.zoo.arms import BOTH, COMPILED, LEVELS
from benchmarks.zoo.catalogue import TORCHVISION
from benchmarks.zoo.faults import further_off, ratio_to

__all__ = ["make_report"]

LEAST = {"torchvision": 16}
"""Architectures that were asked for."""

Row = Mapping[str, Any]


def make_report(
    name: str, notes: Sequence[str], rows: Sequence[Row], record: Mapping[str, str]
) -> Report:
    """The whole report; `record` says what was measured on, as `environment` does."""
    there = {row["name"].partition("/")[2] for row in rows}
    if missing := [model for model in TORCHVISION if model not in there]:
        notes = [*notes, f"**Not measured yet: {', '.join(missing)}.**"]
    report = zoo.make_report(name, notes, rows, record, LEAST)
    return dataclasses.replace(
        report,
        title="torchvision's models in FP16",
        tables=[*report.tables, _more(rows), _frames(rows)],
        verdicts={**report.verdicts, **_verdicts(rows)},
    )


def _more(rows: Sequence[Row]) -> Table:
    def cells(row: Row) -> tuple[str, ...]:
        arms = {arm: row["arms"][arm] for arm in shown}
        ratios = [ratio_to(row, level, BOTH, "error") for level in LEVELS]
        return (
            row["name"].partition("/")[2],
            _of_each(arms, lambda arm: arm["resized"]),
            _of_each(arms, lambda arm: len(arm["frames"])),
            *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        )

    shown = (COMPILED, BOTH, *LEVELS)
    columns = ("model", f"graphs, all sizes: {' / '.join(shown)}", "frames left to Python",
               *(f"{level} over {BOTH}" for level in LEVELS))  # fmt: skip
    return Table("Changing sizes", columns, [cells(row) for row in rows if "arms" in row])


def _frames(rows: Sequence[Row]) -> Table:
    """What O1 leaves to Python, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for frame in row.get("arms", {}).get("O1", {}).get("frames", ()):
            place, _, why = frame.partition(": ")
            found.setdefault((place, why), []).append(row["name"].partition("/")[2])
    lines = [(place, why, ", ".join(models)) for (place, why), models in found.items()]
    return Table("Frames that O1 leaves to Python", ("frame", "why", "models"), lines)


def _of_each(arms: Mapping[str, Row], say: Callable[[Row], int]) -> str:
    return " / ".join("-" if "failed" in arm else str(say(arm)) for arm in arms.values())


def _verdicts(rows: Sequence[Row]) -> dict[str, bool]:
    verdicts = {}
    for level in LEVELS:
        both = [
            row for row in rows
            if "arms" in row and all("error" in row["arms"][arm] for arm in (level, BOTH))
        ]  # fmt: skip
        near = sum(not further_off(row, level, BOTH) for row in both)
        claim = f"{level}'s gradients no further off than {BOTH}'s"
        verdicts[f"{claim}: {near} of {len(both)}"] = near == len(both)
    return verdicts
