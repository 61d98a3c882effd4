"""Times the sizes of `calls.py` on a device, within a budget.

1. Sizes go by ascending work. Each gets an equal share of the time that is left, so time that small
   sizes don't use goes to the large ones.
2. A dtype is left out at a size where one call would take too much of the share: on CPUs FP16
   products can be a hundred times slower than FP32, and one large one would use up the budget. A
   call can't be interrupted, so its time is predicted first: the first dtype's time at this size,
   times how many times slower the dtype was at the last sizes.
3. The dtypes of a size take turns, round after round, so that other load on the machine hits all of
   them; a turn is a block of calls long enough for the clock. The fastest block counts: other
   programs only ever add time, and a busy machine can spoil more than half of the blocks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from .. import logs
from ..devices.capabilities import Capabilities
from ..devices.registry import capabilities
from ..errors import MPCompileError
from . import calls
from .calls import Point
from .cost_model import DTYPES, Profile, Sample, flops
from .store import empty_profile

ROUNDS = 50  # at most; with more, the fastest is hardly faster
WARM_UPS = 3
PART = 1 / 8  # of a size's share that one call may take


def measure(
    device: torch.device,
    *,
    seconds: float = 100.0,
    points: Sequence[Point] | None = None,
    build: Callable[[Point, torch.dtype, torch.device], calls.Calls] = calls.build,
    clock: Callable[[], float] | None = None,
    progress: Callable[[Point, int, int], None] = lambda point, done, of: None,
) -> Profile:
    """Measure a profile of `device` in about `seconds` seconds.

    FP32 products are measured with torch's current settings, which say whether TF32 may be used.

    Args:
        points: sizes to measure (default: `calls.points`).
        build: makes the calls of one point in one dtype.
        clock: seconds, monotonic. Default: wall time; if torch computes with one thread on a CPU,
            the CPU time of the process, which other programs don't affect.
        progress: called before each size with (the size, how many are done, of how many).

    Raises:
        MPCompileError: the time was too short for any size, or the device is not supported.
    """
    can = capabilities(device)
    if clock is None:
        alone = not can.asynchronous and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
    ordered = sorted(points or calls.points(large=can.asynchronous), key=_work)
    timer = _Timer(can, clock, build)
    deadline = clock() + seconds
    samples: list[Sample] = []
    for done, point in enumerate(ordered):
        progress(point, done, len(ordered))
        share = (deadline - clock()) / (len(ordered) - done)
        if share > 0:
            samples += timer.point(point, share)
    if not samples:
        raise MPCompileError(f"nothing could be measured in {seconds:g} seconds: allow more")
    profile = replace(empty_profile(device), samples=tuple(samples))
    logs.event(
        "profile", logging.INFO, "measured",
        "a profile of %(device)s was measured: %(samples)d samples",
        device=profile.device, samples=len(samples),
    )  # fmt: skip
    return profile


@dataclass
class _Timer:
    can: Capabilities
    clock: Callable[[], float]
    build: Callable[[Point, torch.dtype, torch.device], calls.Calls]
    # (kind, dtype) -> its times over those of the first dtype, at the sizes tried so far
    ratios: dict[tuple[str, torch.dtype], list[float]] = field(default_factory=dict)

    def point(self, point: Point, share: float) -> list[Sample]:
        """Measure one size in every dtype that takes at most its share of the time."""
        end = self.clock() + share
        timed: dict[torch.dtype, tuple[calls.Calls, float]] = {}
        for dtype in DTYPES:
            reference = timed[DTYPES[0]][1] if timed else None
            if (ready := self._ready(point, dtype, share * PART, reference)) is not None:
                timed[dtype] = ready
            elif not timed:  # the reference for the other dtypes
                return []
        fastest = {dtype: [math.inf, math.inf] for dtype in timed}
        for turn in range(ROUNDS):
            started = self.clock()
            first = turn % len(timed)  # each starts a round in turn
            for dtype in (*list(timed)[first:], *list(timed)[:first]):
                made, cost = timed[dtype]
                count = max(1, math.ceil(self.can.turn / cost))
                for i, call in enumerate((made.forward, made.both)):
                    fastest[dtype][i] = min(fastest[dtype][i], self._block(call, count))
            if 2 * self.clock() - started > end:  # another round would not fit
                break
        samples = [
            Sample(point.kind, dtype, point.dims, forward, max(forward, both))
            for dtype, (forward, both) in fastest.items()
        ]
        for sample in samples:
            self.ratios[point.kind, sample.dtype].append(sample.total / samples[0].total)
        return samples

    def _ready(
        self, point: Point, dtype: torch.dtype, limit: float, reference: float | None
    ) -> tuple[calls.Calls, float] | None:
        """The calls, warmed up, and the seconds of one call; None if they fail or take too long.

        `reference` is the first dtype's time here, or None. A dtype that takes no longer than that
        is not refused.
        """
        ratios = self.ratios.setdefault((point.kind, dtype), [])
        if reference is not None:
            limit = max(limit, 2 * reference)
            if ratios and min(ratios[-2:]) * reference > limit:
                return None
        try:
            made = self.build(point, dtype, self.can.device)
            cost = self._block(made.both, 1)
            # The first call also chooses a kernel, and a busy machine may slow down any call.
            for _ in range(WARM_UPS if cost <= 20 * limit else 0):
                cost = min(cost, self._block(made.both, 1))
        except RuntimeError:  # no such kernel in this dtype, or too little memory
            return None
        if cost <= limit:
            return made, cost
        if reference is not None:
            ratios.append(cost / reference)
        return None

    def _block(self, call: Callable[[], object], count: int) -> float:
        """Seconds of one call, averaged over `count` calls in a row."""
        self.can.synchronize()
        start = self.clock()
        for _ in range(count):
            call()
        self.can.synchronize()
        return max(1e-9, (self.clock() - start) / count)


def _work(point: Point) -> float:
    """The measure by which sizes are ordered: operations; for a copy ten times its bytes, which
    take about as long.
    """
    return flops(point.kind, point.dims) or 10.0 * point.dims[0]
