"""Every training of every row: each row in a process of its own, two rows at a time on two cores.

A row that is done is kept (`store.py`): a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

import torch

from benchmarks.harness.processes import json_from_process
from benchmarks.harness.record import environment
from benchmarks.harness.report import plain

from .store import Kept, Row, Store, fingerprint, packages, read_row
from .task import Task
from .tasks import ROWS
from .training import train
from .ways import FP32, QUALITY, Way

__all__ = ["FULL", "QUICK", "Work", "keep", "train_elsewhere", "train_rows"]


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


def train_rows(work: Work, device: torch.device) -> dict[str, Kept]:
    """Task's name -> its row; of those that lack a package here, those that are committed."""
    here = [task for task in ROWS if not task.lacking]
    if not work.processes:
        name = environment(device)["name"]
        return {task.name: Kept("", name, _row(task, work, device, QUALITY)) for task in here}
    # A GPU is one machine; on a CPU, each row has one core.
    workers = 1 if device.type == "cuda" else os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        rows = pool.map(lambda task: keep(task, device), here)
        trained = {task.name: row for task, row in zip(here, rows, strict=True)}
    store = Store(device.type)
    elsewhere = {task.name: store.latest(task) for task in ROWS if task.lacking}
    return trained | {name: row for name, row in elsewhere.items() if row is not None}


def _row(task: Task, work: Work, device: torch.device, ways: Sequence[Way]) -> Row:
    row: Row = {}
    for way in ways:
        row[way.name] = []
        for seed in work.seeds_of(way):
            outcome = train(task, way, seed, work.emit, device, work.steps)
            row[way.name].append(outcome)
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in outcome.metrics.items())
            print(f"{task.name}, {way.name}, seed {seed}: {metrics} ({outcome.seconds:.0f} s)",
                  file=sys.stderr, flush=True)  # fmt: skip
    return row


def keep(task: Task, device: torch.device) -> Kept:
    """The row that is kept, or else a new one."""
    store = Store(device.type)
    if (found := store.kept(task)) is None:
        found = train_elsewhere(task, device, QUALITY)
        store.put(task, found)
    return found


def train_elsewhere(
    task: Task, device: torch.device, ways: Sequence[Way], mixed_seeds: int = FULL.mixed_seeds
) -> Kept:
    """Train in a process of its own. The fingerprint is that of the code as it is now."""
    code = fingerprint(task)
    row = [known.name for known in ROWS].index(task.name)
    chosen = [str(QUALITY.index(way)) for way in ways]
    runs = json_from_process(
        "-m", "benchmarks.papers.rows", str(row), device.type, str(mixed_seeds),
        *chosen, environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    machine = environment(device)["name"]
    return read_row(
        {"fingerprint": code, "machine": machine, "packages": packages(task), "runs": runs}
    )


if __name__ == "__main__":
    index, kind, mixed_seeds, *chosen = sys.argv[1:]
    work = dataclasses.replace(FULL, mixed_seeds=int(mixed_seeds))
    ways = [QUALITY[int(number)] for number in chosen]
    print(json.dumps(plain(_row(ROWS[int(index)], work, torch.device(kind), ways))))
