"""Does mpcompile compute on this machine what was meant? `mpcompile check`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from ..check.run import Result, check
from ..devices.registry import default_device
from ..errors import MPCompileError
from .common import Commands, known_device, show

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the command of this file."""
    parser = commands.add_parser(
        "check",
        help="find out what this machine's compiler gets wrong",
        description="Train about twenty small models under Inductor, with all that is compiled "
        "compared with the same graphs run operator by operator; it takes some minutes. The exit "
        "status is 1 if something was compiled wrongly, or fails.",
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="write there, for each graph that is compiled wrongly, a program that shows it",
    )  # fmt: skip
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace, console: Console) -> int:
    device = known_device(options.device) or default_device()
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise MPCompileError(f"--out {options.out} is a file: name a folder")
    results = []
    with console.status("checking"):
        for result in check(device, options.out):
            results.append(result)
            for line in _lines(result):
                show(console, line)
    wrong = sum(bool(result.faults) for result in results)
    values = sum(result.values for result in results)
    show(console, f"{values} values of {len(results)} models were right; "
         f"{wrong or 'no'} model{'' if wrong == 1 else 's'} had a fault")  # fmt: skip
    return 1 if wrong else 0


def _lines(result: Result) -> list[str]:
    told = f"verified {result.values} values, at most {result.worst:.2g} of a rounding off"
    still = f" ({'; '.join(result.open)})" if result.open else ""
    head = f"{result.about}: {told}, in {result.seconds:.0f} s{still}"
    return [head, *(f"  {fault}" for fault in result.faults)]
