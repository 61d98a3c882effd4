"""Every training of every row: each row in a process of its own, two rows at a time on two cores.

A row that is done is kept in `benchmarks/scratch`, under a name that changes with the code that
made it: a run that was interrupted goes on where it was. A row in the committed results stands for
one that is kept, if the same code made it; the results name the machine of each.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import inspect
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.processes import ROOT, json_from_process
from benchmarks.harness.record import environment
from benchmarks.harness.report import RESULTS, SCRATCH, plain

from .task import Task
from .tasks import ROWS
from .training import Outcome, train
from .ways import FP32, QUALITY, Way

__all__ = [
    "FULL",
    "QUICK",
    "Kept",
    "Row",
    "Work",
    "is_of_now",
    "keep",
    "kept",
    "latest",
    "train_rows",
]

Row = dict[str, list[Outcome]]
"""Way -> an outcome for each seed."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """A row, and where it comes from.

    Attributes:
        fingerprint: of the code that trained it; "" if that was a quick run.
        machine: the name of its processor, or GPU.
    """

    fingerprint: str
    machine: str
    runs: Row


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
    """Task's name -> its row."""
    if not work.processes:
        name = environment(device)["name"]
        return {task.name: Kept("", name, _row(task, work, device)) for task in ROWS}
    # A GPU is one machine; on a CPU, each row has one core.
    workers = 1 if device.type == "cuda" else os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        rows = pool.map(lambda task: keep(task, device), ROWS)
        return {task.name: row for task, row in zip(ROWS, rows, strict=True)}


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


def keep(task: Task, device: torch.device) -> Kept:
    """The row that is kept, or else a new one."""
    if (found := kept(task, device)) is None:
        found = _train_elsewhere(task, device)
        file = _file(task, device, found.fingerprint)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(plain(found)))
    return found


def kept(task: Task, device: torch.device) -> Kept | None:
    """The row as this code has trained it, on this machine or as committed; None if it has not."""
    file = _file(task, device, _fingerprint(task))
    row = _read(json.loads(file.read_text())) if file.exists() else _committed(task, device)
    return row if row is not None and is_of_now(task, row) else None


def latest(task: Task, device: torch.device) -> Kept | None:
    """That row, or else the newest that an earlier state of the code trained."""
    if (row := kept(task, device)) is not None:
        return row
    files = _file(task, device, "").parent.glob(f"{task.name} *.json")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    return _read(json.loads(newest.read_text())) if newest else _committed(task, device)


def is_of_now(task: Task, row: Kept) -> bool:
    """Whether the code as it is now has trained it."""
    return row.fingerprint == _fingerprint(task)


def _committed(task: Task, device: torch.device) -> Kept | None:
    results = RESULTS / f"papers_{device.type}.json"
    rows = json.loads(results.read_text())["rows"] if results.exists() else {}
    return _read(rows[task.name]) if task.name in rows else None


def _file(task: Task, device: torch.device, fingerprint: str) -> Path:
    return SCRATCH / f"papers_{device.type}" / f"{task.name} {fingerprint}.json"


def _train_elsewhere(task: Task, device: torch.device) -> Kept:
    """In a process of its own. The fingerprint is that of the code as it is now."""
    fingerprint, index = _fingerprint(task), str(ROWS.index(task))
    runs = json_from_process(
        "-m", "benchmarks.papers.rows", index, device.type, environment={"OMP_NUM_THREADS": "1"}
    )
    machine = environment(device)["name"]
    return _read({"fingerprint": fingerprint, "machine": machine, "runs": runs})


def _read(row: Mapping[str, Any]) -> Kept:
    runs = {
        way: [Outcome(**{**outcome, "metrics": _numbers(outcome["metrics"])}) for outcome in runs]
        for way, runs in row["runs"].items()
    }
    return Kept(row["fingerprint"], row["machine"], runs)


def _numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The results have null for NaN, which JSON lacks."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


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
    print(json.dumps(plain(_row(ROWS[int(index)], FULL, torch.device(kind)))))
