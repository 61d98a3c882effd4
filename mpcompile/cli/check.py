"""Does mpcompile work with this torch? `mpcompile check`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from ..check.run import check
from ..torch_inside import checked
from ..torch_inside.failures import Failure, Health
from .common import Commands, show

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the command of this file."""
    parser = commands.add_parser(
        "check",
        help="find out what works with this torch",
        description="Try every private name of torch that mpcompile takes, and compare about "
        "twenty tiny trainings with FP64, which takes a minute. What fails is switched off from "
        "then on for these versions of torch, mpcompile and Python. The exit status is 1 if "
        "something fails.",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write there, not to the user's cache directory"
    )
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace, console: Console) -> int:
    with console.status("checking") as status:
        health = check(progress=lambda about: status.update(f"checking: {about}"))
    for failure in health.failures:
        show(console, _line(failure))
    show(console, verdict(health))
    file = options.out or checked.path()
    try:
        checked.write(health, file)
    except OSError as error:
        show(console, f"this is not remembered: {file} can't be written ({error.strerror})")
    return 1 if health.failures else 0


def _line(failure: Failure) -> str:
    follows = failure.part.value if failure.part else "a warning says so where it happens"
    return f"{failure} -> {follows}"


def verdict(health: Health) -> str:
    """How much was tried, and how much failed."""
    failed = len(health.failures) or "nothing"
    return f"torch {health.torch}: {health.tried} names and programs were tried, {failed} failed"
