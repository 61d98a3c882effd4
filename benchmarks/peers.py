"""The papers' tasks, a whole training step: time and bytes against every peer.

The tasks are those of the `papers` benchmark, each with its own loop: forward, loss, backward,
clipping where it clips, the optimizer's step. The peers are plain PyTorch, eager and under
`torch.compile`, in FP32 and under autocast, with fused optimizers and with a GradScaler where the
low dtype is FP16; and torch.compile with an activation_memory_budget of 0.5. The low dtype is BF16
on a CPU, where mpcompile runs with `dtype="auto"`, and FP16 elsewhere. O1 has the same plain fused
optimizer as the peers, O2 an `MPOptimizer`. `mpcompile(step)` can't compile two of the steps as a
whole, Deep Speech 2's (its CTC loss) and the big LSTM's (projections): they run in pieces there.

Bytes saved for the backward are those that autograd holds after the forwards of a step. The peak
is the most that a step adds to what lies there between two steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import timing, ways
from benchmarks.harness.checking import ALIKE
from benchmarks.harness.peak import peak_bytes
from benchmarks.harness.processes import call_elsewhere
from benchmarks.harness.report import (
    SCRATCH,
    Claims,
    Report,
    Settings,
    Table,
    environment,
    paragraphs,
    plain,
    where,
)
from benchmarks.papers.rows import fingerprint
from benchmarks.papers.task import Task
from benchmarks.step_times import REFUSED
from mpcompile.demo.train import bytes_saved_for_backward


def run(settings: Settings) -> Report:
    """Measure everything; under `settings.quick` two rounds, without compiling."""
    return _compared(QUICK if settings.quick else FULL, settings.device)


def rerun(device: torch.device) -> Report:
    """A few tasks that are compiled fast, to be held against the committed ratios."""
    return _compared(RERUN, device)


def _compared(work: Work, device: torch.device) -> Report:
    title = f"Every peer on the papers' tasks, on {where(device)}"
    return make_report(title, work, measure_all(work, device), paragraphs(__doc__))


# -- measure ---------------------------------------------------------------------------------------
# Seconds of a step, and bytes, of each task under every arm. A process for each task.
#
# A task that is measured is kept in `benchmarks/scratch` until all are: a run that was interrupted
# goes on where it was, if it is the same code on the same machine.


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured, and how often.

    Attributes:
        seconds: that a turn should take.
        module: where the tasks are: its `TASKS`.
        tasks: the names of those that are measured; none: all.
        arms: the names of the ways that are; none: all.
        resumes: whether it goes on where an earlier run was interrupted.
    """

    emit: str = "inductor"
    rounds: int = 48
    seconds: float = 0.2
    processes: bool = True
    module: str = "benchmarks.papers.tasks"
    tasks: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    resumes: bool = False


FULL = Work(resumes=True)
RERUN = Work(rounds=10, tasks=("DLRM", "GPT"))
QUICK = Work("eager", rounds=2, seconds=0.0, processes=False)


@dataclasses.dataclass
class Row:
    """What the arms of a task showed. Each dict is by the arm's name.

    Attributes:
        seconds: per step, a sample a round.
        first: seconds of the first step, which compiles.
        saved: bytes that autograd holds for the backward of a step.
        peak: the most bytes that a step adds to those that lie there between steps.
        state: bytes of the optimizers' state, and of working copies of weights.
        parameters: bytes of the parameters in FP32.
        left_out: arm -> why it was not timed.
    """

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    first: dict[str, float] = dataclasses.field(default_factory=dict)
    saved: dict[str, int] = dataclasses.field(default_factory=dict)
    peak: dict[str, int] = dataclasses.field(default_factory=dict)
    state: dict[str, int] = dataclasses.field(default_factory=dict)
    parameters: int = 0
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)


def measure_all(work: Work, device: torch.device) -> dict[str, Row]:
    """Task's name -> its row, one after the other."""
    rows = measure_some(work, device)
    if work.resumes:
        shutil.rmtree(_folder(work, device))  # the next run measures again
    return rows


def measure_some(work: Work, device: torch.device) -> dict[str, Row]:
    """As `measure_all`, as a part of a run: what it keeps, the next one takes up."""
    known: Sequence[Task] = importlib.import_module(work.module).TASKS
    tasks = [task for task in known if not work.tasks or task.name in work.tasks]
    if not work.processes:
        return {task.name: _measured(task, work, device) for task in tasks}
    rows = {}
    for task in tasks:
        rows[task.name] = _row(task, work, device)
        print(f"{task.name}: measured", file=sys.stderr, flush=True)
    return rows


def _row(task: Task, work: Work, device: torch.device) -> Row:
    if not work.resumes:
        return Row(**_measured_elsewhere(task, work, device))
    file = _folder(work, device) / f"{task.name} {_condition(task, device)}.json"
    if not file.exists():
        found = _measured_elsewhere(task, work, device)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return Row(**json.loads(file.read_text()))


def _folder(work: Work, device: torch.device) -> Path:
    return SCRATCH / f"{work.module}_{device.type}"


def _measured_elsewhere(task: Task, work: Work, device: torch.device) -> Any:
    with tempfile.TemporaryDirectory() as caches:  # the first step is to compile
        own = {"TORCHINDUCTOR_CACHE_DIR": caches, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        given = task.name, dataclasses.asdict(work), device.type
        return call_elsewhere("benchmarks.peers:measured", *given, environment=own)


def measured(name: str, work: dict[str, Any], kind: str) -> Any:
    """What the fresh process does: one task under every arm."""
    (task,) = (task for task in importlib.import_module(work["module"]).TASKS if task.name == name)
    return plain(_measured(task, Work(**work), torch.device(kind)))


def _condition(task: Task, device: torch.device) -> str:
    """Of the code, and of the machine as far as times depend on it."""
    record = environment(device)
    facts = [record.get(key) for key in ALIKE]
    return hashlib.sha256(repr([fingerprint(task), *facts]).encode()).hexdigest()[:12]


class _Begun:
    """A task's training under one arm."""

    def __init__(self, task: Task, way: ways.Way, work: Work, device: torch.device) -> None:
        torch.manual_seed(0)
        self.trainer = ways.trainer_for(way, work.emit, device)
        self.step: Callable[[], Tensor] = task.start(self.trainer, 0).step

    def saved_bytes(self) -> int:
        """By hooks on what autograd saves; working copies of weights lie there anyway."""
        with bytes_saved_for_backward(nn.ModuleList(self.trainer.models)) as held:
            self.step()
        anyway = {copy.untyped_storage().data_ptr() for copy in self.trainer.copies()}
        return sum(size for address, size in held.items() if address not in anyway)

    def state_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.trainer.kept())


def _measured(task: Task, work: Work, device: torch.device) -> Row:
    # More ways than Dynamo compiles one function for before it gives up.
    torch._dynamo.config.recompile_limit = 64
    row, wait = Row(), timing.idle_wait(device)
    chosen = [
        way for way in ways.everyones(device, work.emit) if not work.arms or way.name in work.arms
    ]
    begun = {way.name: _Begun(task, way, work, device) for way in chosen}
    base = next(iter(begun))
    for name in list(begun):
        try:
            row.first[name] = timing.seconds_of(begun[name].step, wait)
            # Ours in FP16 searches for the loss scale first. A peer may take seconds.
            for _ in range(0 if name in ways.PEERS else 2):
                begun[name].step()
        except RuntimeError as error:
            if name not in ways.PEERS or REFUSED not in str(error):
                raise
            row.left_out[name] = f"torch says: {error}"
            del begun[name]
    timed = [
        timing.Arm(name, begun[name].step) for name in (*ways.PEERS, *ways.OURS) if name in begun
    ]
    for name, spent in timing.far_behind(timed, wait=wait).items():
        if name in ways.PEERS:
            row.left_out[name] = f"{spent:.1f} s a step"
    timed = [arm for arm in timed if arm.name not in row.left_out]
    steps = _steps(begun[base].step, work.seconds, wait)
    row.seconds = timing.take_turns(
        timed, rounds=work.rounds, steps=steps, settle=max(1, steps // 4), wait=wait
    )
    for name in [name for name in begun if name not in row.left_out]:
        row.saved[name] = begun[name].saved_bytes()
        row.peak[name] = peak_bytes(begun[name].step, device)
        row.state[name] = begun[name].state_bytes()
    models = begun[base].trainer.models
    row.parameters = sum(p.nbytes for model in models for p in model.parameters())
    return row


def _steps(step: Callable[[], Any], seconds: float, wait: Callable[[], None]) -> int:
    """How many steps take about so long."""
    spent = timing.take_turns([timing.Arm("", step)], rounds=3, steps=2, wait=wait)[""]
    return max(2, round(seconds / min(spent)))


# -- report ----------------------------------------------------------------------------------------
# Ratios to each peer, the losing rows first; geometric means; bytes.

MEAN, LEAST = 1.2, 0.97
"""What is asked of the geometric mean over compile + autocast, and of each row."""

Ratios = Mapping[str, Mapping[str, timing.Ratio]]


def make_report(
    title: str,
    work: Work,
    rows: Mapping[str, Row],
    notes: Sequence[str],
    asked: tuple[float, float] | None = (MEAN, LEAST),
) -> Report:
    """The whole report.

    Args:
        asked: of the geometric mean, and of each row; None: nothing is.
    """
    units = all(ways.AUTOCAST in row.seconds for row in rows.values())
    base = ways.AUTOCAST if units else ways.COMPILED
    ratios = {
        name: {f"{ours} over {peer}": timing.ratio(row.seconds[peer], row.seconds[ours])
               for ours in ways.OURS for peer in ways.PEERS if row.seconds.keys() >= {ours, peer}}
        for name, row in rows.items()
    }  # fmt: skip
    left_out = [
        f"{name}: {way} is left out: {why}."
        for name, row in rows.items()
        for way, why in row.left_out.items()
    ]
    how = timing.how_compared(work.rounds)
    return Report(
        title=title,
        notes=[*notes, f"All arms of a task in one process. {how} MB are 10^6 bytes.", *left_out],
        tables=[
            _means(rows),
            *(_ratios(ratios, ours, _peers(rows)) for ours in ways.OURS),
            _times(rows),
            _bytes(rows),
            _firsts(rows),
        ],
        verdicts=dict(_verdicts(rows, ratios, base, *asked)) if asked else {},
        data={"rounds": work.rounds, "rows": plain(rows), "ratios": plain(ratios)},
    )  # fmt: skip


def geometric_mean(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], resamples: int = 2000
) -> tuple[float, float, float]:
    """(mean, low, high) over tasks of the median over rounds of peer/ours.

    Args:
        pairs: of each task the peer's samples and ours, in the same rounds.
        resamples: of each task's rounds, drawn with replacement; low and high hold 95% of them.
    """
    generator = np.random.default_rng(0)
    logs, drawn = [], []
    for peer, ours in pairs:
        paired = np.log(np.asarray(peer, dtype=np.float64) / np.asarray(ours, dtype=np.float64))
        logs.append(np.median(paired))
        chosen = generator.integers(len(paired), size=(resamples, len(paired)))
        drawn.append(np.median(paired[chosen], axis=1))
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    return float(np.exp(np.mean(logs))), float(np.exp(low)), float(np.exp(high))


def _over(rows: Mapping[str, Row], ours: str, peer: str) -> tuple[float, float, float] | None:
    timed = [row.seconds for row in rows.values() if peer in row.seconds]
    if any(ours not in seconds for seconds in timed):
        return None  # a mean over fewer tasks is no mean over the tasks
    pairs = [(seconds[peer], seconds[ours]) for seconds in timed]
    return geometric_mean(pairs) if pairs else None


def _peers(rows: Mapping[str, Row]) -> list[str]:
    """Those that were measured."""
    return [peer for peer in ways.PEERS if any(peer in row.seconds for row in rows.values())]


def _means(rows: Mapping[str, Row]) -> Table:
    lines = []
    for peer in _peers(rows):
        cells = []
        for ours in ways.OURS:
            found = _over(rows, ours, peer)
            cells.append("{:.2f}x [{:.2f}, {:.2f}]".format(*found) if found else "")
        lines.append((peer, str(sum(peer in row.seconds for row in rows.values())), *cells))
    return Table("Geometric mean over the tasks", ("over", "tasks", *ways.OURS), lines)


def _ratios(ratios: Ratios, ours: str, peers: Sequence[str]) -> Table:
    """The rows that lose most first."""

    def over(name: str, peer: str) -> timing.Ratio | None:
        return ratios[name].get(f"{ours} over {peer}")

    def least(name: str) -> float:
        first = over(name, ways.AUTOCAST) or over(name, ways.COMPILED)
        return first.paired if first else 0.0

    lines = [
        (name, *(str(over(name, peer) or "") for peer in peers))
        for name in sorted(ratios, key=least)
    ]
    return Table(f"{ours}: how many times faster", ("task", *peers), lines)


def _times(rows: Mapping[str, Row]) -> Table:
    arms = (*_peers(rows), *ways.OURS)
    lines = [
        (name, *(timing.summarize(row.seconds[way]).text(digits=2) if way in row.seconds else ""
                 for way in arms))
        for name, row in rows.items()
    ]  # fmt: skip
    return Table("A step, ms", ("task", *arms), lines)


def _bytes(rows: Mapping[str, Row]) -> Table:
    lines = []
    for name, row in rows.items():
        for way in (ways.COMPILED, ways.AUTOCAST, ways.BUDGETED, *ways.OURS, ways.RECOMPUTES):
            if way in row.saved:
                counted = (row.saved[way], row.peak[way], row.state[way])
                lines.append((name, way, *(f"{count / 1e6:.2f}" for count in counted)))
    columns = ("task", "arm", "saved for the backward, MB", "peak of a step, MB",
               "optimizer's state and working copies, MB")  # fmt: skip
    return Table("Bytes", columns, lines)


def _firsts(rows: Mapping[str, Row]) -> Table:
    arms = [
        way for way in (*ways.PEERS, *ways.OURS) if any(way in row.first for row in rows.values())
    ]
    lines = [
        (name, *(f"{row.first[way]:.1f}" if way in row.first else "" for way in arms))
        for name, row in rows.items()
    ]
    return Table("The first step, which compiles, s", ("task", *arms), lines)


def _verdicts(
    rows: Mapping[str, Row], ratios: Ratios, base: str, mean: float, least: float
) -> Claims:
    for ours in ways.OURS:
        found = _over(rows, ours, base)
        if base == ways.AUTOCAST and found:
            claim = f"{ours}: geometric mean at least {mean}x {base}: {found[0]:.2f}x"
            yield claim, found[0] >= mean
        for name, row in ratios.items():
            if (found_here := row.get(f"{ours} over {base}")) is not None:
                one = found_here.paired
                yield f"{ours}, {name}: at least {least}x {base}: {one:.2f}x", one >= least
