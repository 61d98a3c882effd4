"""`python3 -m benchmarks.gpu --out DIR`: run what has not passed yet, and sum it up.

Exit status: 0 every piece has passed, 1 not every piece, 2 it could not start.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from . import packages, summary
from .pieces import LONGEST, PIECES
from .runner import GRACE, PASSED, ROOT, Piece, Record, read, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: that of the process) and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    pieces = _chosen(options, parser)
    if options.list:
        for piece in pieces:
            print(f"{piece.name:<24} {piece.limit:4.0f} s  {' '.join(piece.command)}")
        return 0
    if options.out is None:
        parser.error("--out DIR is needed")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    folder = out / summary.PACKAGES
    try:
        if options.wheels is not None:
            unpacked = packages.unpack(options.wheels, folder)
            print(f"from wheels: {', '.join(unpacked) or 'nothing, Python has it all'}")
    except (packages.CannotUnpack, FileNotFoundError) as error:
        parser.error(str(error))
    if missing := packages.missing(folder):
        parser.error(f"can't import {', '.join(missing)}: install them, or give --wheels DIR")
    signal.signal(signal.SIGTERM, _terminated)

    def sum_up(_: Record) -> None:
        summary.write([read(piece, out) for piece in pieces], out)

    environment = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # By default a process starts a compiler for each core, and four processes test at once.
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // 4)),
    }
    if not options.fake:  # so that a profile that was measured earlier changes nothing here
        environment["XDG_CACHE_HOME"] = str(out / "cache")
    records = run(
        pieces, out, seconds=options.seconds, versions=_versions(), environment=environment,
        after=sum_up,
    )  # fmt: skip
    print(summary.table(records, out))
    summary.write(records, out)
    return 0 if all(record.status == PASSED for record in records) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PIECE", help="only these (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"start nothing that might not end by then; at least {LONGEST + GRACE:.0f}",
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="packages that Python lacks")
    parser.add_argument("--fake", metavar="GPU", help="what can be seen on a GPU by name: h100, t4")
    parser.add_argument("--list", action="store_true", help="name the pieces; run nothing")
    return parser


def _chosen(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Piece]:
    known = {piece.name: piece for piece in PIECES}
    for name in options.names:
        if name not in known:
            parser.error(f"no piece {name!r}; known: {', '.join(known)}")
    pieces = [known[name] for name in options.names or known]
    if not options.fake:
        return pieces
    return [
        dataclasses.replace(p, command=tuple(x.replace("{gpu}", options.fake) for x in p.by_name))
        for p in pieces
        if p.by_name
    ]


def _terminated(number: int, frame: FrameType | None) -> None:
    """A request to end takes the piece that runs along."""
    sys.exit(128 + number)


def _versions() -> dict[str, str]:
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
        commit = found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        commit = "unknown"
    return {
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "commit": commit,
    }


if __name__ == "__main__":
    sys.exit(main())
