"""A small training in FP32 and in mixed precision, side by side: `mpcompile demo`."""

from __future__ import annotations

import argparse

from rich.console import Console

from ..demo.run import DemoSettings
from ..demo.run import run as run_demo
from .common import Commands, Help, add_option, complain, known_device


def add(commands: Commands) -> None:
    """Add the command of this file."""
    demo = commands.add_parser(
        "demo",
        help="train a small GPT in FP32 and in mixed precision, side by side",
        formatter_class=Help,
    )
    defaults = DemoSettings()
    demo.add_argument("--steps", type=_steps, default=defaults.steps, help="training steps")
    add_option(demo, "dtype", default=defaults.dtype)
    add_option(demo, "level", default=defaults.level, choices=("O1", "O2"))
    add_option(demo, "emit", default=defaults.emit, help="what runs the graphs of both models")
    demo.add_argument("--device", default=defaults.device, help="auto, cpu, cuda or cuda:1")
    demo.add_argument("--seed", type=int, default=defaults.seed, help="of weights and batches")
    add_option(demo, "dump", default=defaults.dump)
    demo.set_defaults(run=_demo)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 2 is needed")
    return int(text)


def _demo(options: argparse.Namespace, console: Console) -> int:
    known_device(options.device)
    settings = DemoSettings(
        steps=options.steps,
        dtype=options.dtype,
        level=options.level,
        emit=options.emit,
        device=options.device,
        seed=options.seed,
        dump=options.dump,
    )
    fault = run_demo(settings, console).fault
    if fault is None:
        return 0
    complain(fault)
    return 1
