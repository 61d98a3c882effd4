"""The papers' tasks under every arm: seconds of a step, and bytes. A process for each task.

A task that is measured is kept in `benchmarks/scratch` until all are: a run that was interrupted
goes on where it was, if it is the same code on the same machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.checking import ALIKE
from benchmarks.harness.peak import peak_bytes
from benchmarks.harness.processes import call_elsewhere
from benchmarks.harness.report import SCRATCH, environment, plain
from benchmarks.harness.timing import Arm, far_behind, idle_wait, low_beside, seconds_of, take_turns
from benchmarks.harness.ways import Way, trainer_for
from benchmarks.papers.rows import fingerprint
from benchmarks.papers.task import Task, Training
from benchmarks.step_times import REFUSED
from mpcompile.demo.train import bytes_saved_for_backward


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


def _measured_elsewhere(task: Task, work: Work, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = call_elsewhere(
        "benchmarks.peers.measure:measured", task.name, dataclasses.asdict(work), device.type,
        environment={"OMP_NUM_THREADS": str(torch.get_num_threads())},
    )  # fmt: skip
    return found


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

    def __init__(self, task: Task, way: Way, work: Work, device: torch.device) -> None:
        torch.manual_seed(0)
        self.trainer = trainer_for(way, work.emit, device)
        self.training: Training = task.start(self.trainer, 0)

    def step(self) -> Tensor:
        return self.training.step()

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
    row, wait = Row(), idle_wait(device)
    chosen = [way for way in ways(device, work.emit) if not work.arms or way.name in work.arms]
    begun = {way.name: _Begun(task, way, work, device) for way in chosen}
    base = next(iter(begun))
    for name in list(begun):
        try:
            row.first[name] = seconds_of(begun[name].step, wait)
            # Ours in FP16 searches for the loss scale first. A peer may take seconds.
            for _ in range(0 if name in PEERS else 2):
                begun[name].step()
        except RuntimeError as error:
            if name not in PEERS or REFUSED not in str(error):
                raise
            row.left_out[name] = f"torch says: {error}"
            del begun[name]
    timed = [Arm(name, begun[name].step) for name in (*PEERS, *OURS) if name in begun]
    for name, spent in far_behind(timed, wait=wait).items():
        if name in PEERS:
            row.left_out[name] = f"{spent:.1f} s a step"
    timed = [arm for arm in timed if arm.name not in row.left_out]
    steps = _steps(begun[base].step, work.seconds, wait)
    row.seconds = take_turns(
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
    spent = take_turns([Arm("", step)], rounds=3, steps=2, wait=wait)[""]
    return max(2, round(seconds / min(spent)))


# -- ways ------------------------------------------------------------------------------------------
# The arms: what users have without mpcompile, and mpcompile.

EAGER = "eager FP32"
COMPILED = "compile FP32"
EAGER_AUTOCAST = "eager autocast"
AUTOCAST = "compile + autocast"
BUDGETED = "compile + autocast, budget 0.5"
PEERS = (EAGER, COMPILED, EAGER_AUTOCAST, AUTOCAST, BUDGETED)
PIECES = ("mpcompile O1", "mpcompile O2")
WHOLE = ("mpcompile O1, whole step", "mpcompile O2, whole step")
OURS = (*PIECES, *WHOLE)
RECOMPUTES = "mpcompile O2, recompute"


def ways(device: torch.device, emit: str) -> tuple[Way, ...]:
    """All arms on a device: on a CPU in BF16, else in FP16; ours by `dtype="auto"`.

    Every peer has a fused optimizer, those in FP16 a GradScaler. Only Inductor recomputes.
    """
    low = low_beside(device)
    ours = "auto"
    return (
        Way(EAGER, fused=True),
        Way(COMPILED, compiled=True, fused=True),
        Way(EAGER_AUTOCAST, low, fused=True),
        Way(AUTOCAST, low, compiled=True, fused=True),
        Way(BUDGETED, low, compiled=True, fused=True, budget=0.5),
        Way(PIECES[0], ours, "O1", fused=True),
        Way(PIECES[1], ours, "O2"),
        Way(WHOLE[0], ours, "O1", whole=True),
        Way(WHOLE[1], ours, "O2", whole=True),
        Way(RECOMPUTES, ours, "O2", options={"recompute": emit == "inductor"}),
    )
