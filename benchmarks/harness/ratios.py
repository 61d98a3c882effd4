"""Medians and percentiles of samples, and ratios of two arms that took turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

__all__ = ["Ratio", "Summary", "ratio", "summarize"]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Median, 10th and 90th percentile, in the samples' unit."""

    median: float
    p10: float
    p90: float

    def text(self, unit: float = 1e3, digits: int = 1) -> str:
        """`median [p10, p90]`, each times `unit`: 1e3 shows seconds as milliseconds."""
        values = (self.median, self.p10, self.p90)
        middle, low, high = (f"{value * unit:.{digits}f}" for value in values)
        return f"{middle} [{low}, {high}]"


def summarize(samples: Sequence[float]) -> Summary:
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=np.float64), [10, 50, 90])
    return Summary(float(median), float(p10), float(p90))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times faster one arm is than its baseline; above 1 is faster.

    Attributes:
        of_medians: the baseline's median time over the arm's.
        paired: median over the rounds of (baseline's time / arm's time) within the round.
        low, high: 95% bootstrap interval of `paired`: rounds drawn with replacement.
    """

    of_medians: float
    paired: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.paired:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def ratio(
    baseline: Sequence[float], arm: Sequence[float], *, resamples: int = 2000, seed: int = 0
) -> Ratio:
    """Compare two arms of the same rounds.

    Raises:
        ValueError: the arms have different numbers of samples, or none.
    """
    if len(baseline) != len(arm) or not len(arm):
        raise ValueError(f"arms of the same rounds are needed, got {len(baseline)} and {len(arm)}")
    base, ours = (np.asarray(x, dtype=np.float64) for x in (baseline, arm))
    paired = base / ours
    draws = np.random.default_rng(seed).integers(len(paired), size=(resamples, len(paired)))
    low, high = np.percentile(np.median(paired[draws], axis=1), [2.5, 97.5])
    return Ratio(
        of_medians=float(np.median(base) / np.median(ours)),
        paired=float(np.median(paired)),
        low=float(low),
        high=float(high),
    )
