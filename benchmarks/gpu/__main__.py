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

from benchmarks.gpu import packages, runner
from benchmarks.harness.processes import ROOT


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
    folder = out / runner.PACKAGES
    try:
        if options.wheels is not None:
            unpacked = packages.unpack(options.wheels, folder)
            print(f"from wheels: {', '.join(unpacked) or 'nothing, Python has it all'}")
    except (packages.CannotUnpack, FileNotFoundError) as error:
        parser.error(str(error))
    if missing := packages.missing(folder):
        parser.error(f"can't import {', '.join(missing)}: install them, or give --wheels DIR")
    signal.signal(signal.SIGTERM, _terminated)

    def sum_up(_: runner.Record) -> None:
        runner.write_summary([runner.read(piece, out) for piece in pieces], out)

    environment = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # By default a process starts a compiler for each core, and four processes test at once.
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // 4)),
    }
    if not options.fake:  # so that a profile that was measured earlier changes nothing here
        environment["XDG_CACHE_HOME"] = str(out / "cache")
    records = runner.run(
        pieces, out, seconds=options.seconds, versions=_versions(), environment=environment,
        after=sum_up,
    )  # fmt: skip
    print(runner.summary_table(records, out))
    runner.write_summary(records, out)
    return 0 if all(record.status == runner.PASSED for record in records) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PIECE", help="only these (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"start nothing that might not end by then; at least {LONGEST + runner.GRACE:.0f}",
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="packages that Python lacks")
    parser.add_argument("--fake", metavar="GPU", help="what can be seen on a GPU by name: h100, t4")
    parser.add_argument("--list", action="store_true", help="name the pieces; run nothing")
    return parser


def _chosen(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[runner.Piece]:
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


# -- pieces ----------------------------------------------------------------------------------------
# What is run on a device, the most telling pieces first.

MODELS = 4
"""Of `benchmarks/real_models`."""

ROWS = 15
"""Of the papers' table; those of torchvision end at once where it isn't installed."""

LONGEST = 480
"""Seconds of the longest piece: it fits into a call of ten minutes, its start and end included."""

_MPCOMPILE = ("-c", "import sys; from mpcompile.cli import main; sys.exit(main())")


def _tests(name: str, limit: float, *paths: str, workers: int = 4) -> runner.Piece:
    """Tests marked gpu. Warnings don't fail them: a device that nobody has seen may bring new ones
    of torch's, which the log lists, and which should not hide what the tests say. Each result is in
    the log as it comes, and a test that hangs takes its worker with it alone: so where tests
    measure, and nothing may run beside them, there is one worker.
    """
    return runner.Piece(
        name,
        ("-m", "pytest", "-m", "gpu", "-v", "-n", str(workers), "-W", "default",
         "-p", "no:cacheprovider", "--junitxml={out}/tests.xml",
         *(f"tests/{path}.py" for path in paths)),
        limit,
    )  # fmt: skip


def _benchmark(name: str, limit: float) -> runner.Piece:
    command = ("-m", "benchmarks", "run", name, "--device", "cuda", "--out", "{out}")
    return runner.Piece(f"benchmark-{name}", command, limit)


def _row(number: int) -> runner.Piece:
    """One row of the papers' table; the benchmark after them collects what they keep."""
    return runner.Piece(f"papers-{number}", ("-m", "benchmarks.papers", "cuda", str(number)), 300)


def _model(number: int) -> runner.Piece:
    """One of the models that people train; the benchmark after them collects what they keep."""
    return runner.Piece(
        f"model-{number}",
        ("-c", f"from benchmarks.real_models import keep; keep('cuda', {number})"),
        480,
    )


PIECES = (
    runner.Piece("info", (*_MPCOMPILE, "info", "--device", "cuda"), 60,
          by_name=("-m", "benchmarks.gpu.by_name", "{gpu}")),
    runner.Piece("check", (*_MPCOMPILE, "check", "--device", "cuda"), 240),
    *(_model(number) for number in range(MODELS)),
    _benchmark("real_models", 480),
    # What it measures, the planner uses in the pieces below: it lies in the cache directory.
    runner.Piece("profile", (*_MPCOMPILE, "profile", "--device", "cuda", "--seconds", "100"), 240),
    # It measures: nothing else beside it.
    _tests("tests-costs", 300, "devices/test_gpu_costs", workers=1),
    _benchmark("saved_bytes", 480),
    _tests("tests", 480, "devices/test_gpu"),
    _tests("tests-numerics", 420, "devices/test_gpu_numerics"),
    _tests("tests-elsewhere", 480, "devices/test_device_sheets", "devices/test_profile_store",
           "optim/test_optim_scale", "passes/test_fused_head", "passes/test_joint",
           "verify/test_verify_planted"),
    _benchmark("gpt", 480),
    _benchmark("optimizer_step", 420),
    runner.Piece("demo", (*_MPCOMPILE, "demo", "--device", "cuda", "--dump", "{out}/dump"), 300),
    _benchmark("first_steps", 480),
    _benchmark("overhead", 300),
    _benchmark("peers", 480),
    *(_row(number) for number in range(ROWS)),
    _benchmark("papers", 480),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
