"""What goes wrong in a model's numbers: `mpcompile diagnose`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ..diagnosis.diagnose import diagnose_call
from ..diagnosis.report import Report
from .common import (
    DEFAULTS,
    LEVELS,
    Commands,
    add_option,
    command,
    failed,
    given,
    made,
    new_file,
    show,
    show_tables,
)

_DIAGNOSE_OPTIONS = (
    "dtype", "level", "policy", "loss_scale", "fuse_head", "recompute", "disable_passes",
)  # fmt: skip


def add(commands: Commands) -> None:
    """Add the command of this file."""
    diagnose = command(
        commands,
        "diagnose",
        help="find the line of your model where a number goes wrong",
        about="Take a training step of a copy of a model in FP64, in FP32 and as mpcompile "
        "rewrites it, and report the operators that overflow, underflow or are far off, with their "
        "lines in your program, and what to keep in FP32. The exit status is 1 if --fail-on-fault "
        f"is given and something is wrong. {DEFAULTS}.",
    )
    own: dict[str, dict[str, Any]] = {
        "level": {"choices": LEVELS},
        "loss_scale": {"type": _loss_scale, "metavar": "SCALE"},
    }
    for name in _DIAGNOSE_OPTIONS:
        add_option(diagnose, name, default=argparse.SUPPRESS, **own.get(name, {}))
    diagnose.add_argument("--steps", type=int, default=1, help="of AdamW; stops at the first fault")
    diagnose.add_argument(
        "--html", type=new_file, metavar="FILE", help="also write the report as one HTML file"
    )
    diagnose.add_argument("--json", action="store_true", help="print JSON")
    diagnose.add_argument(
        "--fail-on-fault",
        action="store_true",
        help="fail if a fault is found, or if the loss is not finite",
    )
    diagnose.set_defaults(run=_diagnose)


def _loss_scale(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a word, which the option's own check reads


def _diagnose(options: argparse.Namespace, console: Console) -> int:
    model, args, kwargs, loss_fn = made(options)
    with console.status("a step in FP64, in FP32, and as it is rewritten"):
        report = diagnose_call(
            model,
            args,
            kwargs,
            loss_fn=loss_fn,
            steps=options.steps,
            options=given(options, _DIAGNOSE_OPTIONS),
        )
    if options.html:
        report.to_html(options.html)
    if options.json:
        show(console, json.dumps(report.to_dict(), indent=1, allow_nan=False))
    else:
        show_tables(console, report)
    return failed(_faults(report) if options.fail_on_fault else ())


def _faults(report: Report) -> Iterator[str]:
    if report.faults:
        found = "; ".join(str(fault).splitlines()[0] for fault in report.faults)
        yield f"--fail-on-fault: faults: {len(report.faults)}: {found}"
    elif not math.isfinite(loss := report.losses["low"]):
        yield f"--fail-on-fault: the loss is {loss}"
