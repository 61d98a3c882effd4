"""One training: a task, a way, a seed."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch

from .task import Metrics, Task
from .ways import Way, trainer_for

__all__ = ["Outcome", "spans", "train"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        metrics: of data held out, and "last training loss": the mean over the last tenth.
        curve: training loss, means over equal spans of the steps.
        scales: for each model with a loss scale, (the scale at the end, steps skipped).
        seconds: all of it, with compiling and judging.
    """

    metrics: Metrics
    curve: list[float]
    scales: list[tuple[float, int]]
    seconds: float


def train(
    task: Task, way: Way, seed: int, emit: str, device: torch.device, steps: int | None = None
) -> Outcome:
    """Train from a seed; `steps` in place of the task's."""
    start = time.perf_counter()
    torch._dynamo.reset()  # each run compiles anew: no limit on recompilations is reached
    torch.manual_seed(seed)
    trainer = trainer_for(way, emit, device)
    training = task.start(trainer, seed)
    losses = [training.step().item() for _ in range(steps or task.steps)]
    last = losses[-max(1, len(losses) // 10) :]
    return Outcome(
        metrics={"last training loss": statistics.fmean(last), **training.judge()},
        curve=spans(losses),
        scales=trainer.scales(),
        seconds=time.perf_counter() - start,
    )


def spans(values: Sequence[float], count: int = 50) -> list[float]:
    """Means over `count` equal spans, or fewer where there are fewer values."""
    size = max(1, len(values) // count)
    return [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
