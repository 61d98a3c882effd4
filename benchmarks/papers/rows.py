"""Every training of every row: each row in a process of its own, two rows at a time on two cores.

A row that is done is kept (`Store`): a run that was interrupted goes on where it was.
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
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.processes import ROOT, call_elsewhere
from benchmarks.harness.report import RESULTS, SCRATCH, environment, plain
from benchmarks.harness.ways import Way
from benchmarks.papers.task import FP32, QUALITY, Outcome, Task, train
from benchmarks.papers.tasks import ROWS


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
        return {task.name: Kept("", name, train_row(task, work, device, QUALITY)) for task in here}
    # A GPU is one machine; on a CPU, each row has one core.
    workers = 1 if device.type == "cuda" else os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        rows = pool.map(lambda task: keep(task, device), here)
        trained = {task.name: row for task, row in zip(here, rows, strict=True)}
    store = Store(device.type)
    elsewhere = {task.name: store.latest(task) for task in ROWS if task.lacking}
    return trained | {name: row for name, row in elsewhere.items() if row is not None}


def train_row(task: Task, work: Work, device: torch.device, ways: Sequence[Way]) -> Row:
    """An outcome for each seed of each way; tells its way on stderr."""
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
    runs = call_elsewhere(
        "benchmarks.papers.rows:train_named", task.name, device.type, mixed_seeds,
        [way.name for way in ways], environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    machine = environment(device)["name"]
    return read_row(
        {"fingerprint": code, "machine": machine, "packages": packages(task), "runs": runs}
    )


def train_named(name: str, kind: str, mixed_seeds: int, ways: Sequence[str]) -> Any:
    """What the fresh process does: one task, in these ways."""
    (task,) = (task for task in ROWS if task.name == name)
    work = dataclasses.replace(FULL, mixed_seeds=mixed_seeds)
    chosen = [way for way in QUALITY if way.name in ways]
    return plain(train_row(task, work, torch.device(kind), chosen))


# -- store -----------------------------------------------------------------------------------------
# Rows that are kept: in `benchmarks/scratch` under the code that made them, or as committed.
#
# A row in the committed results stands for one that is kept, if the same code made it; the
# results name the machine of each.

Row = dict[str, list[Outcome]]
"""Way -> an outcome for each seed."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """A row, and where it comes from.

    Attributes:
        fingerprint: of the code that trained it; "" if that was a quick run.
        machine: the name of its processor, or GPU.
        packages: torch and what the task needs beside it, as `packages` names them; "": unknown.
    """

    fingerprint: str
    machine: str
    runs: Row
    packages: str = ""

    def is_of_now(self, task: Task) -> bool:
        """Whether the code as it is now has trained it."""
        return self.fingerprint == fingerprint(task)


class Store:
    """The rows of one device.

    Args:
        kind: the device's type.
        section: of the committed results: "rows", or "again".
    """

    def __init__(self, kind: str, section: str = "rows") -> None:
        self._section = section
        self._results = RESULTS / f"papers_{kind}.json"
        self._folder = SCRATCH / f"papers_{kind}" / section

    def put(self, task: Task, row: Kept) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file(task, row.fingerprint).write_text(json.dumps(plain(row)))

    def kept(self, task: Task) -> Kept | None:
        """The row as this code has trained it, on this machine or as committed; None if it has
        not.
        """
        file = self._file(task, fingerprint(task))
        row = read_row(json.loads(file.read_text())) if file.exists() else self._committed(task)
        return row if row is not None and row.is_of_now(task) else None

    def latest(self, task: Task) -> Kept | None:
        """That row, or else the newest that an earlier state of the code trained."""
        if (row := self.kept(task)) is not None:
            return row
        files = self._folder.glob(f"{task.name} *.json")
        newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
        return read_row(json.loads(newest.read_text())) if newest else self._committed(task)

    def _committed(self, task: Task) -> Kept | None:
        results = json.loads(self._results.read_text()) if self._results.exists() else {}
        row = results.get(self._section, {}).get(task.name)
        return read_row(row) if row is not None else None

    def _file(self, task: Task, code: str) -> Path:
        return self._folder / f"{task.name} {code}.json"


def read_row(row: Mapping[str, Any]) -> Kept:
    """A row out of JSON."""
    runs = {
        way: [Outcome(**{**outcome, "metrics": _numbers(outcome["metrics"])}) for outcome in runs]
        for way, runs in row["runs"].items()
    }
    return Kept(row["fingerprint"], row["machine"], runs, row.get("packages", ""))


def _numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The results have null for NaN, which JSON lacks."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def fingerprint(task: Task) -> str:
    """Of the code that trains, and of the packages that it trains with."""
    ours = [file for folder in ("mpcompile", "passes") for file in (ROOT / folder).rglob("*.py")]
    seen: set[str] = set()
    theirs = _sources(task.module, seen) | _sources(train.__module__, seen)
    files = [*sorted(ours), *sorted(theirs)]
    versions = packages(task) if task.needs else torch.__version__
    text = b"".join(file.read_bytes() for file in files) + versions.encode()
    return hashlib.sha256(text).hexdigest()[:12]


def packages(task: Task) -> str:
    """Versions: of torch, and of what the task needs beside it, where it is installed."""
    needed = [f"{name} {version(name)}" for name in task.needs if not task.lacking]
    return ", ".join([f"torch {torch.__version__}", *needed])


def _sources(module: str, seen: set[str]) -> set[Path]:
    """The file of a module of this benchmark, and of those that it takes something from."""
    if module in seen or not module.startswith("benchmarks."):
        return set()
    seen.add(module)
    loaded = sys.modules[module]
    taken = {getattr(value, "__module__", None) or "" for value in vars(loaded).values()}
    inner = (_sources(name, seen) for name in taken if name in sys.modules)
    return {Path(inspect.getfile(loaded))}.union(*inner)
