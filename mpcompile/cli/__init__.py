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
from collections.abc import Sequence

from rich.console import Console

from .._version import __version__
from ..errors import MPCompileError
from . import machine, model
from .common import complain

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: `sys.argv`) and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options, Console())
    except MPCompileError as error:
        complain(str(error))
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpcompile", description="A mixed-precision training compiler for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"mpcompile {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for group in (machine, model):
        group.add(commands)
    return parser
