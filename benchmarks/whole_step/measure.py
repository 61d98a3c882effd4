"""Each task under every arm: times in turns, then memory, and steps without their graphs."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from torch._dynamo.utils import counters

from benchmarks.harness.timing import Arm, far_behind, idle_wait, take_turns
from benchmarks.step_times.measure import REFUSED

from .arms import ARMS, EAGER, PEER, PLAIN, WHOLE, Trainee
from .bare import Graphs
from .peak import peak_bytes
from .starts import Started, measure_starts
from .tasks import Task, Work

__all__ = ["Measured", "Row", "measure_all"]


@dataclasses.dataclass
class Row:
    """What the arms of a task in one dtype showed. Each dict is by the arm's name.

    Attributes:
        losses: of the first steps.
        seconds: per step, a sample a round.
        slow: seconds of a step, for those that are too slow to be timed any further.
        bare: seconds of a step without its compiled graphs.
        held: bytes that lie there between steps.
        peak: the most bytes that a step adds to them.
        left: why a step that is to be whole is not.
        refused: what torch says of an arm that it can't run here.
        untrained: the arms whose optimizers have done nothing.
        graphs: how many graphs Dynamo made of torch.compile(train_step).
    """

    losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    slow: dict[str, float] = dataclasses.field(default_factory=dict)
    bare: dict[str, float] = dataclasses.field(default_factory=dict)
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    peak: dict[str, int] = dataclasses.field(default_factory=dict)
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    untrained: list[str] = dataclasses.field(default_factory=list)
    graphs: int = 0


@dataclasses.dataclass(frozen=True)
class Measured:
    """The rows, and the starts of those tasks that have them: row -> arm -> seconds."""

    rows: dict[str, Row]
    starts: dict[str, dict[str, Started]]


def measure_all(work: Work, device: torch.device) -> Measured:
    """One row after the other, then the starts in processes of their own."""
    rows = {}
    for name, (task, dtype) in work.rows.items():
        rows[name] = _measured(task, dtype, work, device)
        torch._dynamo.reset()
    started = [name for name, (task, dtype) in work.rows.items()
               if task.starts and dtype == task.dtypes[0]]  # fmt: skip
    starts = {
        name: measure_starts(name, [a for a in rows[name].seconds if a != EAGER], device)
        for name in started
    }
    return Measured(rows, starts)


def _measured(task: Task, dtype: str, work: Work, device: torch.device) -> Row:
    row, wait = Row(), idle_wait(device)
    trainees = {arm: Trainee(task, arm, dtype, work.emit, device) for arm in ARMS}
    for arm, trainee in trainees.items():
        before = counters["stats"]["unique_graphs"]
        try:
            row.losses[arm] = trainee.warm_up()
        except RuntimeError as error:
            if arm != PEER or REFUSED not in str(error):
                raise
            row.refused[arm] = str(error)
            continue
        if arm == PLAIN:
            row.graphs = counters["stats"]["unique_graphs"] - before
        if trainee.left is not None:
            row.left[arm] = trainee.left
        if not trainee.trains():
            row.untrained.append(arm)
    # Not ours: a small whole step may well be ten times as fast as any peer.
    theirs = [Arm(arm, trainees[arm].step) for arm in (EAGER, PEER) if arm not in row.refused]
    behind = far_behind(theirs, wait=wait)
    row.slow = {arm: seconds for arm, seconds in behind.items() if arm == PEER}
    out = {*row.slow, *row.refused, *row.untrained}
    timed = {arm: trainee for arm, trainee in trainees.items() if arm not in out}
    row.seconds = take_turns(
        [Arm(arm, trainee.step) for arm, trainee in timed.items()],
        rounds=work.rounds, steps=task.steps, settle=max(1, task.steps // 4), wait=wait,
    )  # fmt: skip
    for arm, trainee in timed.items():
        row.held[arm] = trainee.held_bytes()
        row.peak[arm] = peak_bytes(trainee.step, device)
    for arm, trainee in timed.items():
        if arm != EAGER:
            _measure_bare(row, arm, trainee, task.steps, wait)
    return row


def _measure_bare(
    row: Row, arm: str, trainee: Trainee, steps: int, wait: Callable[[], None]
) -> None:
    graphs = Graphs(trainee.step)
    if arm in WHOLE and arm not in row.left and not graphs.whole:
        row.left[arm] = "each step was one of those that run in pieces"
    spent = []
    with graphs.do_nothing():
        for _ in range(10 + 5 * steps):
            wait()
            start = time.perf_counter()
            trainee.step()
            wait()
            spent.append(time.perf_counter() - start)
    row.bare[arm] = statistics.median(spent[5:])
