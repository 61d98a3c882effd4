"""What goes wrong in a model's numbers: `mpcompile diagnose` and `mpcompile bisect`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ..diagnosis.bisect import TOLERANCE, bisect, within
from ..diagnosis.diagnose import diagnose_call
from ..diagnosis.report import Report
from .common import (
    DEFAULTS,
    LEVELS,
    Commands,
    above_zero,
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
_BISECT_OPTIONS = ("dtype", "level", "policy", "pad", "emit", "fuse_head", "recompute")


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    _add_diagnose(commands)
    _add_bisect(commands)


def _add_diagnose(commands: Commands) -> None:
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
    diagnose.add_argument(
        "--png",
        type=new_file,
        metavar="FILE",
        help="also draw the histogram of activation gradients",
    )
    diagnose.add_argument("--json", action="store_true", help="print JSON")
    diagnose.add_argument(
        "--fail-on-fault",
        action="store_true",
        help="fail if a fault is found, or if the loss is not finite",
    )
    diagnose.set_defaults(run=_diagnose)


def _tolerance(text: str) -> float:
    return above_zero(text, "a number above 0 is needed, such as 0.1")


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
    if options.png:
        report.histogram_png(options.png)
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


def _add_bisect(commands: Commands) -> None:
    search = command(
        commands,
        "bisect",
        help="find the decision that breaks your model",
        about="Run a model in FP32 and compiled, here; where the loss or a gradient is not finite, "
        "or far from FP32's, find the pass or the operator in low precision that makes it so, by "
        "compiling again and again without one.",
    )
    own = {"emit": {"default": "eager"}}
    for name in _BISECT_OPTIONS:
        add_option(search, name, **own.get(name, {}))
    search.add_argument(
        "--tolerance", type=_tolerance, default=TOLERANCE, help="relative error that is no breakage"
    )
    search.set_defaults(run=_bisect)


def _bisect(options: argparse.Namespace, console: Console) -> int:
    model, args, kwargs, _ = made(options)
    with console.status("bisecting") as status:
        found = bisect(
            model,
            args,
            kwargs,
            options=given(options, _BISECT_OPTIONS),
            agrees=within(options.tolerance),
            progress=lambda what: status.update(f"bisecting: {what}"),
        )
    show(
        console,
        "nothing breaks: loss and gradients are near FP32's" if found is None else str(found),
    )
    return 0
