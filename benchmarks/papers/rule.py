"""The rule of parity: mixed precision against the spread of the FP32 seeds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.harness.report import Table
from benchmarks.papers.task import Outcome


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A task's table, and for each mixed precision whether every metric passes the rule."""

    table: Table
    held: dict[str, bool]


def compare(
    name: str, full: str, results: Mapping[str, Sequence[Outcome]], grains: Mapping[str, float]
) -> Comparison:
    """Compare every arm with the one named `full`, metric by metric.

    Args:
        results: arm -> a run for each seed, from the same first seed on.
        grains: metric -> the smallest spread that means anything.
    """
    rows: list[tuple[str, ...]] = []
    held = {arm: True for arm in results if arm != full}
    for metric in results[full][0].metrics:
        base = [outcome.metrics[metric] for outcome in results[full]]
        spread = max(max(base) - min(base), grains.get(metric, 0.0))
        for arm, outcomes in results.items():
            values = [outcome.metrics[metric] for outcome in outcomes]
            offs = ("-", "-", f"{spread:.4f}")
            if arm != full:
                mean, paired = deviations(base, values)
                offs = (f"{mean:+.4f}", f"{paired:+.4f}", "")
                # Not a number is within no spread.
                held[arm] &= abs(mean) <= spread and abs(paired) <= spread
            seeds = " ".join(f"{value:.4f}" for value in values)
            rows.append((metric, arm, f"{statistics.fmean(values):.4f}", seeds, *offs))
    columns = ("metric", "precision", "mean", "seeds", "off the mean", "off the seed", "S")
    return Comparison(Table(name, columns, rows), held)


def deviations(full: Sequence[float], mixed: Sequence[float]) -> tuple[float, float]:
    """(mean of `mixed` less that of `full`; the difference of the pair that differs most).

    Pairs are runs from the same seed; `full` may have more seeds, which only widen its spread.
    """
    pairs = [b - a for a, b in zip(full, mixed, strict=False)]
    worst = max(pairs, key=lambda pair: abs(pair) if pair == pair else float("inf"))
    return statistics.fmean(pairs), worst
