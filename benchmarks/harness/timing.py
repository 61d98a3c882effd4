"""Arms that take turns: interleaved rounds in one process."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from mpcompile.devices.registry import capabilities

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One side of a comparison: a name, and one step of the work to time."""

    name: str
    step: Callable[[], object]


def take_turns(
    arms: Sequence[Arm],
    *,
    rounds: int,
    steps: int = 4,
    settle: int = 1,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time the arms in interleaved rounds: one sample per arm and round, in seconds per step.

    A turn is `settle` steps that do not count (caches hold another arm's data), then `steps` timed
    together. Compile and warm up before: every step here counts.

    Args:
        wait: blocks until the device is idle; called at both ends of the timed part.
        clock: seconds, monotonic.
    """
    samples: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for arm in in_turns(arms, rounds):
        for _ in range(settle):
            arm.step()
        wait()
        start = clock()
        for _ in range(steps):
            arm.step()
        wait()
        samples[arm.name].append((clock() - start) / steps)
    return samples


def in_turns(arms: Sequence[T], rounds: int) -> Iterator[T]:
    """The arms, round after round. Each round starts with another one, so that none always follows
    the same one.
    """
    for turn in range(rounds):
        first = turn % len(arms)
        yield from (*arms[first:], *arms[:first])


def far_behind(
    arms: Sequence[Arm],
    *,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The arms that are not worth many rounds: name -> seconds of one step.

    They take ten times as long as the fastest, or longer: torch's BF16 products on a CPU without
    instructions for them do. One step says as much as a hundred. Compile and warm up before.
    """
    seconds = {arm.name: seconds_of(arm.step, wait, clock) for arm in arms}
    return {name: s for name, s in seconds.items() if s >= 10 * min(seconds.values())}


def seconds_of(
    step: Callable[[], object],
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Of one call; the device is idle at both ends."""
    wait()
    start = clock()
    step()
    wait()
    return clock() - start


def auto_or(dtype: torch.dtype, device: torch.device) -> torch.dtype | str:
    """What a user would ask for: "auto" where that means this dtype, and may find that nothing low
    is faster. Else the dtype: whoever names one gets it, fast or not.
    """
    return "auto" if dtype is capabilities(device).auto else dtype


def low_beside(device: torch.device) -> torch.dtype:
    """What a peer runs in: FP16 products have no fast kernels on most CPUs."""
    return torch.bfloat16 if device.type == "cpu" else torch.float16


def idle_wait(device: torch.device) -> Callable[[], None]:
    """What `take_turns(wait=...)` needs on this device."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


# -- ratios ----------------------------------------------------------------------------------------
# Medians and percentiles of samples, and ratios of two arms that took turns.


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


def how_compared(rounds: int, arm: str = "mpcompile") -> str:
    """For the notes of a report: what its times and ratios are. `arm` is what is held to peers."""
    return (
        f"Median [p10, p90] of {rounds} interleaved rounds. A ratio is the median over the rounds "
        "of the ratio within a round, with its 95% bootstrap interval; above 1, "
        f"{arm} is faster."
    )


def spans(values: Sequence[float], count: int = 50) -> list[float]:
    """Means over `count` equal spans, or fewer where there are fewer values."""
    size = max(1, len(values) // count)
    return [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
