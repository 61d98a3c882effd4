"""Each task under every arm: times in turns, then memory, and steps without their graphs."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.harness.peak import peak_bytes
from benchmarks.harness.processes import starts
from benchmarks.harness.timing import Arm, auto_or, far_behind, idle_wait, seconds_of, take_turns
from benchmarks.harness.ways import Way, trainer_for
from benchmarks.step_times import REFUSED
from benchmarks.whole_step.bare import Graphs
from benchmarks.whole_step.tasks import DTYPES, Task, Work, work_for
from mpcompile import MPCompileWarning
from mpcompile.lower.tracing_settings import traced_with


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


def measure_all(
    work: Work, device: torch.device
) -> tuple[dict[str, Row], dict[str, dict[str, Started]]]:
    """One row after the other, then the starts in processes of their own, of those tasks that have
    them: row -> arm -> seconds.
    """
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
    return rows, starts


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
    with graphs.do_nothing():
        spent = [seconds_of(trainee.step, wait) for _ in range(10 + 5 * steps)]
    row.bare[arm] = statistics.median(spent[5:])


# -- arms ------------------------------------------------------------------------------------------
# The arms: one training step, made ready in each way.

EAGER = "eager FP32, fused AdamW"
PEER = "compile + autocast + GradScaler + fused AdamW"
PLAIN = "torch.compile(train_step), FP32"
PIECES = ("pieces O1", "pieces O2")
WHOLE = ("whole O1", "whole O2")
OURS = (*PIECES, *WHOLE)
ARMS = (EAGER, PEER, PLAIN, *OURS)

WARM_UP = 3
"""Steps after which everything is compiled: the first in FP16 searches for the loss scale."""


def _way(arm: str, dtype: str, device: torch.device) -> Way:
    if arm not in OURS:
        low = DTYPES[dtype] if arm == PEER else None
        return Way(arm, low, compiled=arm == PEER, fused=arm != PLAIN)
    return Way(
        arm, auto_or(DTYPES[dtype], device), arm[-2:], options={"strict": False}, generated=True,
        whole=arm in WHOLE,
    )  # fmt: skip


class Trainee:
    """The models of a task under one arm, ready to step on one fixed batch.

    Attributes:
        arm: its name.
        left: why a training step that is to be whole runs in pieces, or None.
    """

    def __init__(self, task: Task, arm: str, dtype: str, emit: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.arm = arm
        built = task.build()
        self._batch = [x.to(device) for x in task.draw()]
        self.trainer = trainer_for(_way(arm, dtype, device), emit, device)
        self.models = [self.trainer.model(model) for model in built]
        adam = functools.partial(torch.optim.AdamW, lr=1e-4, fused=False)
        steppers = [self.trainer.optimizer(adam, [*m.parameters()]) for m in self.models]
        self._step = self.trainer.whole(task.make(self.trainer, self.models, steppers))
        if arm == PLAIN:
            compiled = torch.compile(self._step, backend=emit)
            self._step = traced_with(compiled, trace_autograd_ops=True)

    def step(self) -> Tensor:
        """One step; returns its loss. Nothing waits for the device but a GradScaler."""
        return self._step(*self._batch)

    def warm_up(self) -> list[float]:
        """Compile everything. Returns the losses."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MPCompileWarning)  # the report says what is not whole
            return [float(self.step()) for _ in range(WARM_UP)]

    def trains(self) -> bool:
        """Whether each parameter has been updated by an optimizer."""
        return all(
            optimizer.state.get(p)
            for model, optimizer in zip(self.models, self.trainer.optimizers, strict=True)
            for p in model.parameters()
        )

    @property
    def left(self) -> str | None:
        return self._step.left if self.arm in WHOLE else None  # type: ignore[attr-defined]

    def held_bytes(self) -> int:
        """Bytes that lie there between steps, but for the batch."""
        tensors = [t for m in self.models for t in (*m.parameters(), *m.buffers())]
        tensors += self.trainer.kept()
        parameters = [p for model in self.models for p in model.parameters()]
        tensors += [p.grad for p in parameters if p.grad is not None]
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
        return sum(storages.values())


# -- starts ----------------------------------------------------------------------------------------
# Starts in fresh processes: from the call that compiles until everything is compiled.


Started = dict[str, float]
"""Seconds of a "cold" start with empty caches, and of a "warm" one with those that it has left."""


def measure_starts(row: str, arms: Sequence[str], device: torch.device) -> dict[str, Started]:
    """A cold and a warm start of each arm of a row, which has caches of its own."""
    steps = "benchmarks.whole_step.measure:first_steps"
    found = {arm: starts(2, steps, row, arm, device.type) for arm in arms}
    return {arm: dict(zip(("cold", "warm"), spent, strict=True)) for arm, spent in found.items()}


def first_steps(row: str, arm: str, kind: str) -> float:
    """What the fresh process does: seconds of compiling, and of the steps that this takes."""
    device = torch.device(kind)
    work = work_for(device)
    task, dtype = work.rows[row]
    torch.empty(1, device=device)

    def begin() -> None:
        Trainee(task, arm, dtype, work.emit, device).warm_up()

    return seconds_of(begin, idle_wait(device))
