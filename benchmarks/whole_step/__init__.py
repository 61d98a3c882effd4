"""A training step compiled as a whole, against pieces, and against what torch compiles of it.

A step is forward, loss, backward, the optimizer's step and zero_grad; DCGAN's has two backwards
and two optimizers. The peer is what a user of torch would write: torch.compile of the model,
autocast, GradScaler (in FP16) and fused AdamW. "torch.compile(train_step)" is in FP32, with
`torch._dynamo.config.trace_autograd_ops`: forward and backward become one graph, and torch leaves
the graph at each `optimizer.step()`, which becomes another (so AdamW is not the fused one, which
torch doesn't trace). Ours are "pieces", `mpcompile(model)`, and "whole", `mpcompile(train_step)`,
both with an MPOptimizer. Everything runs in one thread.

Without its graphs: the same step when each call of a compiled graph returns at once what it
returned before. What remains is Python, Dynamo's guards, the autograd engine, and all that is not
compiled: of the peer, its fused AdamW and GradScaler. Medians of steps of one arm after the other.

Held: parameters, buffers, optimizer state and working copies. Peak: that, and the most that one
step allocates beyond what is there when it begins; on a CPU by the profiler's record of each
allocation of a tensor's memory, on CUDA by `torch.cuda.max_memory_allocated`. A CPU's operators
take scratch memory of their own (oneDNN's), which is in neither.

Starts are those of fresh processes, from the first compiling call to the end of the third step (in
FP16 the first one searches for the loss scale, so a whole step is compiled in the second): *cold*
with empty caches, *warm* with those that the cold one has left.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.harness import timing
from benchmarks.harness.peak import peak_bytes
from benchmarks.harness.processes import starts
from benchmarks.harness.report import Claims, Report, Settings, Table, paragraphs, plain, where
from benchmarks.harness.ways import Way, trainer_for
from benchmarks.step_times import REFUSED
from benchmarks.whole_step.bare import Graphs
from benchmarks.whole_step.tasks import DTYPES, TINY, Task, Work, work_for
from mpcompile import MPCompileWarning
from mpcompile.lower.tracing_settings import traced_with


def run(settings: Settings) -> Report:
    """Measure every task; under `settings.quick` tiny ones, without Inductor and starts."""
    device = settings.device
    work = TINY if settings.quick else work_for(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, starts = measure_all(work, device)
    finally:
        torch.set_num_threads(threads)
    return make_report(rows, starts, work, device)


# -- measure ---------------------------------------------------------------------------------------
# Each task under every arm: times in turns, then memory, and steps without their graphs.


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
    row, wait = Row(), timing.idle_wait(device)
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
    theirs = [
        timing.Arm(arm, trainees[arm].step) for arm in (EAGER, PEER) if arm not in row.refused
    ]
    behind = timing.far_behind(theirs, wait=wait)
    row.slow = {arm: seconds for arm, seconds in behind.items() if arm == PEER}
    out = {*row.slow, *row.refused, *row.untrained}
    timed = {arm: trainee for arm, trainee in trainees.items() if arm not in out}
    row.seconds = timing.take_turns(
        [timing.Arm(arm, trainee.step) for arm, trainee in timed.items()],
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
        spent = [timing.seconds_of(trainee.step, wait) for _ in range(10 + 5 * steps)]
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
        theirs = DTYPES[dtype] if arm == PEER else None
        return Way(arm, theirs, compiled=arm == PEER, fused=arm != PLAIN)
    low, options = timing.auto_or(DTYPES[dtype], device), {"strict": False}
    return Way(arm, low, arm[-2:], options=options, generated=True, whole=arm in WHOLE)


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
    steps = "benchmarks.whole_step:first_steps"
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

    return timing.seconds_of(begin, timing.idle_wait(device))


# -- report ----------------------------------------------------------------------------------------
# Ratios to the peer, verdicts and tables.

_MB = 1e6


def make_report(
    rows: Mapping[str, Row],
    starts: Mapping[str, Mapping[str, Started]],
    work: Work,
    device: torch.device,
) -> Report:
    """The whole report."""
    ratios = {name: over_peer(row) for name, row in rows.items()}
    tables = [_summary(ratios)]
    tables += [_table(name, row, ratios[name]) for name, row in rows.items()]
    if starts:
        tables.append(_starts(starts))
    return Report(
        title=f"A training step compiled as a whole, on {where(device)}",
        notes=[*paragraphs(__doc__), _how(work), *_remarks(rows)],
        tables=tables,
        verdicts=dict(_verdicts(rows, ratios)),
        data={
            "rounds": work.rounds,
            "steps": {task.name: task.steps for task in work.tasks},
            "rows": plain(rows),
            "ratios": plain(ratios),
            "starts": starts,
        },
    )


def over_peer(row: Row) -> dict[str, timing.Ratio]:
    """For each arm that was timed how many times faster than the peer it is; {} without a peer."""
    if PEER not in row.seconds:
        return {}
    return {
        arm: timing.ratio(row.seconds[PEER], samples)
        for arm, samples in row.seconds.items()
        if arm != PEER
    }


def _how(work: Work) -> str:
    return (
        f"All arms in one process. {timing.how_compared(work.rounds, 'the arm')} The loss is that "
        f"of step {WARM_UP} on a batch that stays the same. MB are 10^6 bytes."
    )


def _remarks(rows: Mapping[str, Row]) -> list[str]:
    """What is not whole and why, what is left out, and how often torch left the graph."""
    remarks = [
        f"{name}: {arm} is not whole: {why}."
        for name, row in rows.items()
        for arm, why in row.left.items()
    ]
    remarks += [
        f"{name}: {arm} takes {seconds:.1f} s a step; left out."
        for name, row in rows.items()
        for arm, seconds in row.slow.items()
    ]
    remarks += [
        f"{name}: {arm} can't run here, torch says: {error}."
        for name, row in rows.items()
        for arm, error in row.refused.items()
    ]
    remarks += [
        f"{name}: {arm} does not train: its optimizer never got a gradient; left out."
        for name, row in rows.items()
        for arm in row.untrained
    ]
    broken = ", ".join(f"{row.graphs} ({name})" for name, row in rows.items())
    return [*remarks, f"Graphs that Dynamo makes of {PLAIN}: {broken}."]


def _summary(ratios: Mapping[str, Mapping[str, timing.Ratio]]) -> Table:
    arms = [arm for arm in ARMS if arm != PEER]
    rows = [
        (name, *(f"{by_arm[arm].paired:.2f}x" if arm in by_arm else "" for arm in arms))
        for name, by_arm in ratios.items()
    ]
    return Table("How many times faster than the peer", ("", *arms), rows)


def _table(name: str, row: Row, ratios: Mapping[str, timing.Ratio]) -> Table:
    lines = [
        (
            arm,
            timing.summarize(row.seconds[arm]).text(digits=3),
            str(ratios.get(arm, "")),
            f"{row.bare[arm] * 1e3:.3f}" if arm in row.bare else "",
            f"{row.held[arm] / _MB:.2f}",
            f"{(row.held[arm] + row.peak[arm]) / _MB:.2f}",
            f"{row.losses[arm][-1]:.4f}",
        )
        for arm in ARMS
        if arm in row.seconds
    ]
    columns = ("arm", "step, ms", "peer over it", "without its graphs, ms", "held, MB", "peak, MB",
               "loss")  # fmt: skip
    return Table(name, columns, lines)


def _starts(starts: Mapping[str, Mapping[str, Started]]) -> Table:
    arms = [arm for arm in ARMS if arm != EAGER]
    rows = [
        (name, *("{cold:.1f} / {warm:.1f}".format(**found[a]) if a in found else "" for a in arms))
        for name, found in starts.items()
    ]
    return Table("Starts, cold / warm, in seconds", ("", *arms), rows)


def _verdicts(rows: Mapping[str, Row], ratios: Mapping[str, Mapping[str, timing.Ratio]]) -> Claims:
    for name, row in rows.items():
        for arm in WHOLE:
            if (found := ratios[name].get(arm)) is not None:
                claim = f"{name}: {arm} takes no longer than the peer: {found}"
                yield claim, found.paired >= 1
                ours, theirs = (row.held[a] + row.peak[a] for a in (arm, PEER))
                claim = (
                    f"{name}: {arm} needs no more memory than the peer: {ours / theirs:.2f} of it"
                )
                yield claim, ours <= theirs
