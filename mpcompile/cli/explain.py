"""What mpcompile does with a model: `mpcompile plan` and `mpcompile explain`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..devices.cuda import AbsentGPU
from ..devices.gpus import GPUS, gpu
from ..plans.plan import ENOUGH, Plan
from ..plans.plan_text import outside, verdict
from ..preview.explain import plan_call
from ..settings import OPTIONS
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

_OPTIONS = tuple(one.name for one in OPTIONS.values() if one.plans)
_GPUS = f"one of {', '.join(GPUS)}"


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    _add_plan(commands)
    _add_explain(commands)


def _add_plan(commands: Commands) -> None:
    plan = command(
        commands,
        "plan",
        help="what would be done with your model on a GPU, without one",
        about="Print what mpcompile would do with a model on a GPU that this machine need not "
        "have: the precision of each operator, the Tensor Core share of the FLOPs, sizes worth "
        "changing, and the bytes saved for the backward. Nothing is trained.",
    )
    plan.add_argument("--device", default="h100", help=_GPUS)
    _add_options(plan)
    plan.set_defaults(run=_plan)


def _add_explain(commands: Commands) -> None:
    explain = command(
        commands,
        "explain",
        help="what is done with your model and why; conditions for a CI",
        about="Print what mpcompile does with a model and why: the precision of each operator, the "
        "Tensor Core share of the FLOPs, graphs left in FP32, graph breaks, and the bytes saved "
        "for the backward. Nothing is trained. The exit status is 1 if a condition of --fail-... "
        f"holds. {DEFAULTS}.",
    )
    explain.add_argument(
        "--device", default="auto", help=f"{_GPUS}, which need not be there; auto: the model's own"
    )
    _add_options(explain, default=argparse.SUPPRESS)
    explain.add_argument(
        "--html", type=new_file, metavar="FILE", help="also write the plan as one HTML file"
    )
    instead = explain.add_mutually_exclusive_group()
    instead.add_argument(
        "--why", metavar="NAME", help="print only why this node or module is what it is"
    )
    instead.add_argument(
        "--diff", type=Path, metavar="JSON", help="print only what differs from that plan"
    )
    explain.add_argument(
        "--fail-under-tensor-core-share",
        type=_share,
        metavar="SHARE",
        help="fail if a smaller share of the FLOPs is eligible for Tensor Cores, 0 to 1",
    )
    explain.add_argument(
        "--fail-on-fp32-fallback",
        action="store_true",
        help="fail if a graph stays in FP32, or products run outside of the graphs",
    )
    explain.add_argument(
        "--fail-on-graph-break", action="store_true", help="fail if the program breaks into graphs"
    )
    explain.set_defaults(run=_explain)


def _add_options(parser: argparse.ArgumentParser, **own: Any) -> None:
    for name in _OPTIONS:
        add_option(parser, name, **own, **({"choices": LEVELS} if name == "level" else {}))
    parser.add_argument(
        "--mp-optimizer", action="store_true", help="an MPOptimizer holds the parameters", **own
    )
    parser.add_argument(
        "--all", action="store_true", help="print each node, with casts and the backward"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text}: a share from 0 to 1 is needed, such as 0.95")
    return share


def _planned(options: argparse.Namespace, console: Console) -> Plan:
    device = None if options.device == "auto" else options.device
    if device is not None:
        gpu(device)  # check before the factory runs
    model, args, kwargs, _ = made(options)
    held = given(options, ["mp_optimizer"])
    with console.status("planning"):
        return plan_call(
            model, args, kwargs, device=device, options=given(options, _OPTIONS), **held
        )


def _plan(options: argparse.Namespace, console: Console) -> int:
    found = _planned(options, console)
    if options.json:
        show(console, _json(found.to_dict()))
    else:
        _show_plan(console, found, all=options.all)
    return 0


def _show_plan(console: Console, plan: Plan, *, all: bool) -> None:
    if all:
        show(console, plan.full())
    else:
        show_tables(console, plan)


def _explain(options: argparse.Namespace, console: Console) -> int:
    other = Plan.load(options.diff) if options.diff else None
    plan = _planned(options, console)
    if options.html:
        plan.to_html(options.html)
    if options.why:
        why = plan.why(options.why)
        show(console, _json({"why": why}) if options.json else why)
    elif options.json:
        show(console, _json((other.diff(plan) if other else plan).to_dict()))
    elif other is not None:
        show_tables(console, other.diff(plan))
    elif options.html:
        console.print("\n".join(verdict(plan)), highlight=False, markup=False, soft_wrap=True)
        console.print(f"written to {options.html}", highlight=False, markup=False, soft_wrap=True)
    else:
        _show_plan(console, plan, all=options.all)
    return failed(_conditions(options, plan))


def _json(data: Any) -> str:
    return json.dumps(data, indent=1)


def _conditions(options: argparse.Namespace, plan: Plan) -> Iterator[str]:
    """The conditions of `--fail-...` that hold, each as a sentence."""
    least = options.fail_under_tensor_core_share
    share = plan.tensor_cores.share * plan.share_in_graphs
    if least is not None and plan.left:
        yield (
            "--fail-under-tensor-core-share: the share of a graph that stays in FP32 is not "
            f"counted: {plan.left[0]}"
        )
    elif least and plan.gpu and not AbsentGPU(plan.gpu).has_units(getattr(torch, plan.dtype)):
        yield (
            f"--fail-under-tensor-core-share: {plan.gpu.name} has no Tensor Cores for {plan.dtype}"
        )
    elif least is not None and share < least:
        yield (
            f"--fail-under-tensor-core-share: the Tensor Core share of the FLOPs is {share:.6g}, "
            f"which is {least - share:.6g} less than {least:g}"
        )
    if options.fail_on_fp32_fallback and plan.left:
        count = f"{len(plan.left)} of {len(plan.graphs)} graphs stay in FP32"
        yield f"--fail-on-fp32-fallback: {count}: {'; '.join(plan.left)}"
    if options.fail_on_fp32_fallback and plan.share_in_graphs < ENOUGH:
        yield f"--fail-on-fp32-fallback: {outside(plan)}"
    if options.fail_on_graph_break and plan.breaks:
        yield f"--fail-on-graph-break: {len(plan.breaks)} graph breaks: {'; '.join(plan.breaks)}"
