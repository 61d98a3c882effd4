"""Run pieces of work in turn, each a process with a limit, and keep what they leave.

    out/NAME/log.txt       what the piece printed, as it came
    out/NAME/record.json   how it ended; a folder without one was broken off
    out/NAME/...           what the piece wrote

A piece that has passed is not run again; one that failed, was killed or broken off is, after those
that were never tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import ROOT

# A process group of its own, so that what a piece starts can be ended with it. (Not `preexec_fn`:
# Python 3.12 warns of it where there are threads.)
_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)
GRACE = 10.0
"""Seconds between the interrupt at the limit, at which Python says where it was, and the kill."""

PASSED, FAILED, KILLED, NOT_RUN = "passed", "failed", "killed", "not run"


@dataclasses.dataclass(frozen=True)
class Piece:
    """One process.

    Attributes:
        name: its folder's, too.
        command: Python's arguments; `{out}` in them stands for the folder.
        limit: seconds, after which the process and all that it started are ended.
        by_name: the same on a GPU that exists by name only, which `{gpu}` stands for; empty where
            nothing would be seen there.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    by_name: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Record:
    """How a piece ended.

    Attributes:
        status: `PASSED`, `FAILED`, `KILLED` at its limit, or `NOT_RUN`.
        exit: the exit status; negative: the signal that ended it.
        seconds: wall time.
        started: UTC, ISO 8601.
        versions: of what it ran on, name -> version.
    """

    name: str
    status: str = NOT_RUN
    command: Sequence[str] = ()
    exit: int | None = None
    seconds: float = 0.0
    started: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def run(
    pieces: Sequence[Piece],
    out: Path,
    *,
    seconds: float | None = None,
    versions: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    after: Callable[[Record], object] = lambda record: None,
    say: Callable[[str], object] = print,
) -> list[Record]:
    """Run what has not passed yet; return the records of all pieces, in their order.

    Args:
        seconds: nothing is started that might not end within them, its whole limit taken.
        environment: variables for every piece, beside those of this process.
        after: called with each record as soon as it is on disk.
    """
    end = None if seconds is None else time.monotonic() + seconds
    for piece in _waiting(pieces, out):
        left = float("inf") if end is None else end - time.monotonic()
        if piece.limit + GRACE > left:
            say(f"{piece.name}: may take {piece.limit:.0f} s, {left:.0f} s are left: another time")
            continue
        say(f"{piece.name}: at most {piece.limit:.0f} s ...")
        record = _run(piece, out / piece.name, versions or {}, environment or {})
        say(f"{piece.name}: {record.status} after {record.seconds:.0f} s")
        after(record)
    return [read(piece, out) for piece in pieces]


def read(piece: Piece, out: Path) -> Record:
    """What is known of a piece: its record, or that there is none."""
    try:
        return Record(**json.loads((out / piece.name / "record.json").read_text()))
    except FileNotFoundError:
        return Record(piece.name)


def _waiting(pieces: Sequence[Piece], out: Path) -> list[Piece]:
    """What has not passed; what was never tried comes first, else one bad piece eats the time."""
    waiting = [piece for piece in pieces if read(piece, out).status != PASSED]
    return sorted(waiting, key=lambda piece: (out / piece.name).exists())


def _run(
    piece: Piece, folder: Path, versions: Mapping[str, str], environment: Mapping[str, str]
) -> Record:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, *(part.replace("{out}", str(folder)) for part in piece.command)]
    started, start = datetime.now(timezone.utc).isoformat(timespec="seconds"), time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_hears_interrupts,
            **_GROUP,
        )
        try:
            process.wait(piece.limit)
            status = FAILED if process.returncode else PASSED
        except subprocess.TimeoutExpired:
            status = KILLED
        finally:  # whatever ends this process ends the piece, too
            _end(process)
    record = Record(
        name=piece.name,
        status=status,
        command=piece.command,
        exit=process.returncode,
        seconds=round(time.monotonic() - start, 1),
        started=started,
        versions=versions,
    )
    unfinished = folder / "record.json.part"
    unfinished.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    unfinished.replace(folder / "record.json")
    return record


def _hears_interrupts() -> None:
    """In a new process: a shell's job in the background ignores interrupts, and so would this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process's group, workers included."""
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- summary ---------------------------------------------------------------------------------------
# What all pieces came to: a table for the console, `summary.md`, `summary.json`, one archive.

ARCHIVE = "results.tar.gz"
"""Everything below `out` in one file, to take home."""

PACKAGES = "packages"
"""The folder of unpacked wheels, which is not taken home."""

_LONGEST = 100


def summary_table(records: Sequence[Record], out: Path) -> str:
    """A row a piece, as a pipe table that reads as plain text, too."""
    rows = [("piece", "status", "seconds", "last line")]
    rows += [(r.name, r.status, f"{r.seconds:.0f}", _last_line(out / r.name)) for r in records]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]

    def line(row: tuple[str, str, str, str]) -> str:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[2] = row[2].rjust(widths[2])
        return "| " + " | ".join(cells) + " |"

    first, second, _, last = ("-" * width for width in widths)
    rule = f"| {first} | {second} | {'-' * (widths[2] - 1)}: | {last} |"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def write_summary(records: Sequence[Record], out: Path) -> None:
    """Write all three files; they say what is known now, so write them after every piece."""
    # Two lines of one name: some pieces ran on another version.
    versions = {
        f"- {name}: {version}" for record in records for name, version in record.versions.items()
    }
    known = "\n".join(
        ["# On a CUDA device", "", *sorted(versions), "", summary_table(records, out), ""]
    )
    (out / "summary.md").write_text(known)
    plain = [dataclasses.asdict(record) for record in records]
    (out / "summary.json").write_text(json.dumps(plain, indent=1) + "\n")
    with tarfile.open(out / ARCHIVE, "w:gz") as archive:
        for path in sorted(out.iterdir()):
            if path.name not in (ARCHIVE, PACKAGES):
                archive.add(path, path.name)


def _last_line(folder: Path) -> str:
    try:
        lines = (folder / "log.txt").read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last.replace("|", "/").strip("=")[:_LONGEST].strip()
