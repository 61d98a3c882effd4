"""Every training of every row: each row in a process of its own, two rows at a time on two cores.

A row that is done is kept in `benchmarks/scratch`, under a name that changes with the code that
made it: a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.processes import ROOT, json_from_process
from benchmarks.harness.report import SCRATCH, plain

from .task import Task
from .tasks import TASKS
from .training import Outcome, train
from .ways import FP32, QUALITY, Way

__all__ = ["FULL", "QUICK", "Work", "keep", "train_rows"]

Row = dict[str, list[Outcome]]
"""Way -> an outcome for each seed."""


@dataclasses.dataclass(frozen=True)
class Work:
    """How much is trained.

    Attributes:
        emit: what runs compiled graphs.
        seeds, mixed_seeds: of FP32, whose spread is the measure; of every other way.
        steps: in place of the task's own.
        processes: whether each row has a process of its own.
    """

    emit: str
    seeds: int
    mixed_seeds: int
    steps: int | None
    processes: bool

    def seeds_of(self, way: Way) -> range:
        return range(self.seeds if way == FP32 else self.mixed_seeds)


FULL = Work("inductor", seeds=10, mixed_seeds=3, steps=None, processes=True)
QUICK = Work("eager", seeds=1, mixed_seeds=1, steps=2, processes=False)


def train_rows(work: Work, device: torch.device) -> dict[str, Row]:
    """Task's name -> its row."""
    if not work.processes:
        return {task.name: _row(task, work, device) for task in TASKS}
    # A GPU is one machine; on a CPU, each row has one core.
    workers = 1 if device.type == "cuda" else os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        rows = pool.map(lambda task: keep(task, device), TASKS)
        return {task.name: row for task, row in zip(TASKS, rows, strict=True)}


def _row(task: Task, work: Work, device: torch.device) -> Row:
    row: Row = {}
    for way in QUALITY:
        row[way.name] = []
        for seed in work.seeds_of(way):
            outcome = train(task, way, seed, work.emit, device, work.steps)
            row[way.name].append(outcome)
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in outcome.metrics.items())
            print(f"{task.name}, {way.name}, seed {seed}: {metrics} ({outcome.seconds:.0f} s)",
                  file=sys.stderr, flush=True)  # fmt: skip
    return row


def keep(task: Task, device: torch.device) -> Row:
    """The row that was kept, or else a new one."""
    file = SCRATCH / f"papers_{device.type}" / f"{task.name} {_fingerprint(task)}.json"
    if not file.exists():
        index = str(TASKS.index(task))
        found = json_from_process(
            "-m", "benchmarks.papers.rows", index, device.type,
            environment={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return _read(json.loads(file.read_text()))


def _read(row: Mapping[str, Sequence[Mapping[str, Any]]]) -> Row:
    return {way: [Outcome(**outcome) for outcome in outcomes] for way, outcomes in row.items()}


def _fingerprint(task: Task) -> str:
    """Of the code that trains, and of torch."""
    ours = [file for folder in ("mpcompile", "passes") for file in (ROOT / folder).rglob("*.py")]
    seen: set[str] = set()
    theirs = _sources(task.module, seen) | _sources(train.__module__, seen)
    files = [*sorted(ours), *sorted(theirs)]
    text = b"".join(file.read_bytes() for file in files) + torch.__version__.encode()
    return hashlib.sha256(text).hexdigest()[:12]


def _sources(module: str, seen: set[str]) -> set[Path]:
    """The file of a module of this benchmark, and of those that it takes something from."""
    if module in seen or not module.startswith("benchmarks."):
        return set()
    seen.add(module)
    loaded = sys.modules[module]
    taken = {getattr(value, "__module__", None) or "" for value in vars(loaded).values()}
    inner = (_sources(name, seen) for name in taken if name in sys.modules)
    return {Path(inspect.getfile(loaded))}.union(*inner)


if __name__ == "__main__":
    index, kind = sys.argv[1:]
    print(json.dumps(plain(_row(TASKS[int(index)], FULL, torch.device(kind)))))
