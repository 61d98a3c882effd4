"""The ``mpcompile`` command.

    info, profile       what this machine offers, and how fast it is
    check               what works with this torch
    demo                a small training in FP32 and in mixed precision
    plan, explain       what mpcompile does with a model, here or on a GPU that isn't there
    diagnose            what goes wrong in a model's numbers

Exit status:

    0   done
    1   `info`: torch is outside the supported range; `check`: something fails; `demo`: the losses
        of the two are more than 2% apart, or not finite; `plan`, `explain` and `diagnose`: a
        condition that `--fail-...` names holds, and stderr says which one and by how much
    2   a request that can't be met: stderr says why
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .._version import __version__

# What each command is in, and its line in the list of them. Only what is asked for is imported: it
# needs torch, which takes seconds.
COMMANDS = {
    "info": ("machine", "what this machine offers, and the dtype chosen"),
    "profile": ("machine", "measure how fast this device is in each dtype, for the planner"),
    "check": (
        "machine", "what works here: versions, units, torch's private names, a verified training"
    ),
    "demo": ("machine", "train a small GPT in FP32 and in mixed precision, side by side"),
    "plan": ("model", "the same as explain"),
    "explain": ("model", "what is done, and why"),
    "diagnose": ("model", "find the line of your model where a number goes wrong"),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: `sys.argv`) and return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser(given).parse_args(given)
    from rich.console import Console

    from ..errors import MPCompileError
    from .common import complain

    try:
        status: int = options.run(options, Console())
    except MPCompileError as error:
        complain(str(error))
        return 2
    return status


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of this command line; the flags of other commands are left out."""
    parser = argparse.ArgumentParser(
        prog="mpcompile", description="A mixed-precision training compiler for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"mpcompile {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (file, help) in COMMANDS.items():
        command = commands.add_parser(name, help=help)
        if name in given:
            importlib.import_module(f".{file}", __name__).FLAGS[name](command)
    return parser
