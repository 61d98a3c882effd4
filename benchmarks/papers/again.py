"""What is off with three seeds, once more with as many seeds as FP32 has.

The rule asks of every single run, in every metric, to lie near the FP32 run of its seed. Of a
hundred such runs, some break it by chance. More seeds tell chance from a fault: for each metric, a
permutation test of the means. It answers how often ten runs drawn from all twenty would differ as
much from the ten others as one way's runs do from FP32's. As many metrics are tested, Holm's
correction is applied to them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from benchmarks.harness.report import Table
from benchmarks.harness.ways import Way
from benchmarks.papers.rows import FULL, Kept, Row, Store, train_elsewhere
from benchmarks.papers.rule import compare
from benchmarks.papers.task import FP32, QUALITY, UNSCALED, Outcome, Task

SIGNIFICANT = 0.05
"""A corrected p below this is not taken for chance."""

_ALL = 200_000  # permutations: more than there are of 10 and 10 runs, so all are counted


def off(task: Task, row: Row) -> list[Way]:
    """The ways that the rule does not pass. Without a loss scale none is promised."""
    held = compare(task.name, FP32.name, row, task.grains).held
    return [way for way in QUALITY[1:] if way != UNSCALED and not held[way.name]]


def look_again(task: Task, row: Kept, device: torch.device) -> Kept | None:
    """The ways that are off in a row, trained from all of FP32's seeds; None if none is off."""
    ways = off(task, row.runs)
    if not ways:
        return None
    store = Store(device.type, "again")
    found = store.kept(task)
    if found is None or not found.runs.keys() >= {way.name for way in ways}:
        found = train_elsewhere(task, device, ways, mixed_seeds=FULL.seeds)
        store.put(task, found)
    return found


def chances(full: Sequence[Outcome], mixed: Sequence[Outcome]) -> dict[str, float]:
    """Metric -> the chance of means that lie at least so far apart, if both ways are alike."""
    return {metric: _chance(_values(full, metric), _values(mixed, metric))
            for metric in full[0].metrics}  # fmt: skip


def _chance(full: Sequence[float], mixed: Sequence[float]) -> float:
    if not all(map(math.isfinite, (*full, *mixed))):
        return 0.0  # a run that ended in NaN is no chance; a p that is NaN would pass for one
    from scipy.stats import permutation_test  # rows are trained where it may be missing

    found = permutation_test(
        (full, mixed),
        lambda a, b, axis: np.mean(a, axis=axis) - np.mean(b, axis=axis),
        vectorized=True,
        n_resamples=_ALL,
    )
    return float(found.pvalue)


def corrected(found: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """Holm: the k-th smallest of n is multiplied by n - k + 1, and none is below a smaller one."""
    result: dict[tuple[str, ...], float] = {}
    least = 0.0
    for k, key in enumerate(sorted(found, key=found.__getitem__)):
        least = max(least, min(1.0, (len(found) - k) * found[key]))
        result[key] = least
    return {key: result[key] for key in found}


def _all_chances(
    rows: Mapping[str, Kept], again: Mapping[str, Kept]
) -> dict[tuple[str, ...], float]:
    """(task, way, metric) -> the chance, not corrected."""
    return {
        (name, way, metric): chance
        for name, looked in again.items()
        for way, mixed in looked.runs.items()
        for metric, chance in chances(rows[name].runs[FP32.name], mixed).items()
    }


def table(rows: Mapping[str, Kept], again: Mapping[str, Kept]) -> Table:
    """A line for each metric of each way that was trained again."""
    plain = _all_chances(rows, again)
    holm = corrected(plain)
    lines = []
    for key, chance in plain.items():
        name, way, metric = key
        full, mixed = rows[name].runs[FP32.name], again[name].runs[way]
        means = (f"{np.mean(_values(runs, metric)):.4f}" for runs in (full, mixed))
        spans = (f"{min(v):.4f} to {max(v):.4f}"
                 for v in (_values(full, metric), _values(mixed, metric)))  # fmt: skip
        lines.append((name, way, metric, *means, *spans, f"{chance:.3f}", f"{holm[key]:.3f}"))
    columns = ("task", "precision", "metric", "FP32, mean", "mean", "FP32, range", "range",
               "p", "p, corrected")  # fmt: skip
    return Table("What is off with three seeds, with ten", columns, lines)


def verdicts(rows: Mapping[str, Kept], again: Mapping[str, Kept]) -> dict[str, bool]:
    """Claim -> whether all metrics of the way may be FP32's, but for chance."""
    holm = corrected(_all_chances(rows, again))
    return {
        f"{name}, {way}: with ten seeds, no metric's mean differs by more than chance": all(
            chance >= SIGNIFICANT for (n, w, _), chance in holm.items() if (n, w) == (name, way)
        )
        for name, looked in again.items()
        for way in looked.runs
    }


def _values(runs: Sequence[Outcome], metric: str) -> list[float]:
    return [outcome.metrics[metric] for outcome in runs]
