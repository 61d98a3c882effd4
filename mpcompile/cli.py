"""The ``mpcompile`` command: ``mpcompile info`` and ``mpcompile demo``.

Exit status: 0 done, 1 torch is outside the supported range, 2 a request that cannot be met.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ._version import __version__
from .demo.run import DemoSettings
from .demo.run import run as run_demo
from .device import device_facts
from .errors import MPCompileError
from .settings import NEWEST, OLDEST, check_torch_version

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: that of the process) and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options, Console())
    except MPCompileError as error:
        Console(stderr=True).print(f"[red]mpcompile:[/red] {escape(str(error))}")
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpcompile", description="A mixed-precision training compiler for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"mpcompile {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    info = commands.add_parser("info", help="what this machine offers, and the dtype chosen")
    info.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    info.set_defaults(run=_info)

    demo = commands.add_parser(
        "demo",
        help="train a small GPT in FP32 and in mixed precision, side by side",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = DemoSettings()
    demo.add_argument("--steps", type=_steps, default=defaults.steps, help="training steps")
    demo.add_argument(
        "--dtype", choices=("auto", "float16", "bfloat16"), default=defaults.dtype, help="low dtype"
    )
    demo.add_argument("--level", choices=("O1", "O2"), default=defaults.level, help="level")
    demo.add_argument(
        "--emit",
        choices=("inductor", "aot_eager", "eager"),
        default=defaults.emit,
        help="what runs the graphs of both models",
    )
    demo.add_argument("--device", default=defaults.device, help="auto, cpu, cuda or cuda:1")
    demo.add_argument("--seed", type=int, default=defaults.seed, help="of weights and batches")
    demo.add_argument(
        "--dump", type=Path, default=defaults.dump, metavar="DIR", help="where the graphs go"
    )
    demo.set_defaults(run=_demo)
    return parser


def _steps(text: str) -> int:
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"{steps}: at least 2 steps are needed")
    return steps


def _demo(options: argparse.Namespace, console: Console) -> int:
    _known_device(options.device)
    settings = DemoSettings(
        steps=options.steps,
        dtype=options.dtype,
        level=options.level,
        emit=options.emit,
        device=options.device,
        seed=options.seed,
        dump=options.dump,
    )
    run_demo(settings, console)
    return 0


def _info(options: argparse.Namespace, console: Console) -> int:
    facts = device_facts(_known_device(options.device))
    wanted = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1]}"
    supported = True
    try:
        check_torch_version(torch.__version__)
    except MPCompileError:
        supported = False
    rows = {
        "mpcompile": __version__,
        "torch": f"{torch.__version__} ({'' if supported else 'NOT '}in the range {wanted})",
        "device": f"{facts.device}: {facts.name}",
        "memory": facts.memory,
        "low-precision units": facts.matrix_units,
        'dtype="auto"': str(facts.dtype),
        "why": facts.reason,
        **facts.libraries,
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(f"[b]{escape(name)}[/b]", escape(value))
    console.print(table)
    return 0 if supported else 1


def _known_device(name: str) -> torch.device | None:
    """Return the device asked for, None for ``"auto"``."""
    if name == "auto":
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MPCompileError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MPCompileError(
            f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices; "
            "use --device cpu, or install a CUDA build of torch"
        )
    return device
