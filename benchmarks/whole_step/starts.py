"""Starts in fresh processes: from the call that compiles until everything is compiled."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence

import torch

from benchmarks.harness.processes import json_from_process
from benchmarks.harness.timing import idle_wait

from .arms import Trainee
from .tasks import work_for

__all__ = ["Started", "first_steps", "measure_starts"]


@dataclasses.dataclass(frozen=True)
class Started:
    """Seconds of a start with empty caches, and of one with those that this one has left."""

    cold: float
    warm: float


def measure_starts(row: str, arms: Sequence[str], device: torch.device) -> dict[str, Started]:
    """A cold and a warm start of each arm of a row, which has caches of its own."""
    found = {}
    for arm in arms:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (
                json_from_process(
                    "-m", "benchmarks.whole_step", row, arm, str(device),
                    environment={"TORCHINDUCTOR_CACHE_DIR": cache},
                )
                for _ in range(2)
            )  # fmt: skip
        found[arm] = Started(cold, warm)
    return found


def first_steps(row: str, arm: str, device: torch.device) -> float:
    """What the fresh process does: seconds of compiling, and of the steps that this takes."""
    work = work_for(device)
    task, dtype = work.rows[row]
    torch.empty(1, device=device)
    wait = idle_wait(device)
    wait()
    start = time.perf_counter()
    trainee = Trainee(task, arm, dtype, work.emit, device)
    trainee.warm_up()
    wait()
    return time.perf_counter() - start
