"""The commands about a model of yours: what mpcompile does with it (`plan`, `explain`), and what
goes wrong in its numbers (`diagnose`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..devices.cuda import AbsentGPU
from ..devices.gpus import GPUS, gpu
from ..diagnosis.diagnose import diagnose_call
from ..diagnosis.report import Report
from ..planner.plan_data import ENOUGH
from ..planner.plan_text import outside, verdict
from ..plans.model_plan import Plan
from ..preview.explain import plan_call
from ..preview.factory import made_by
from ..settings import OPTIONS
from ..torch_inside.names import pytree
from .common import (
    DEFAULTS,
    LEVELS,
    add_option,
    failed,
    given,
    known_device,
    new_file,
    number,
    show,
    show_tables,
    takes_factory,
)

_OPTIONS = tuple(one.name for one in OPTIONS.values() if one.plans)
_GPUS = f"one of {', '.join(GPUS)}"
_DIAGNOSE_OPTIONS = (
    "dtype", "level", "policy", "loss_scale", "fuse_head", "recompute", "disable_passes",
)  # fmt: skip


def _add_explain(explain: argparse.ArgumentParser) -> None:
    takes_factory(
        explain,
        "Print what mpcompile does with a model, on this machine or on a GPU that it need "
        "not have, and why: the precision of each operator, the Tensor Core share of the FLOPs, "
        "sizes worth changing, graphs left in FP32, graph breaks, and the bytes saved for the "
        "backward. Nothing is trained. The exit status is 1 if a condition of --fail-... holds. "
        f"{DEFAULTS}.",
    )
    explain.add_argument(
        "--device", default="auto", help=f"{_GPUS}, which need not be there; auto: the model's own"
    )
    for option in _OPTIONS:
        own = {"choices": LEVELS} if option == "level" else {}
        add_option(explain, option, **own)
    flag = functools.partial(explain.add_argument, action="store_true")
    held = "an MPOptimizer holds the parameters"
    flag("--mp-optimizer", default=argparse.SUPPRESS, help=held)
    flag("--all", help="print each node, with casts and the backward")
    flag("--json", help="print JSON")
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
    share = "fail if a smaller share of the FLOPs is eligible for Tensor Cores, 0 to 1"
    explain.add_argument("--fail-under-tensor-core-share", type=_share, metavar="SHARE", help=share)
    outside = "fail if a graph stays in FP32, or products run outside of the graphs"
    flag("--fail-on-fp32-fallback", help=outside)
    flag("--fail-on-graph-break", help="fail if the program breaks into graphs")
    explain.set_defaults(run=_explain)


def _share(text: str) -> float:
    return number(text, lambda n: 0 <= n <= 1, "a share from 0 to 1 is needed, such as 0.95")


def _explain(options: argparse.Namespace, console: Console) -> int:
    other = Plan.load(options.diff) if options.diff else None
    device = None if options.device == "auto" else options.device
    if device is not None:
        gpu(device)  # check before the factory runs
    model, args, kwargs, _ = made_by(options.factory)
    held = given(options, ["mp_optimizer"])
    with console.status("planning"):
        plan = plan_call(
            model, args, kwargs, device=device, options=given(options, _OPTIONS), **held
        )
    if options.html:
        plan.to_html(options.html)
    found = other.diff(plan) if other else plan
    if options.why:
        why = plan.why(options.why)
        show(console, json.dumps({"why": why}, indent=1) if options.json else why)
    elif options.json:
        show(console, json.dumps(found.to_dict(), indent=1))
    elif options.html and other is None:
        for line in (*verdict(plan.title, plan.graphs), f"written to {options.html}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    elif options.all and other is None:
        show(console, plan.full())
    else:
        show_tables(console, found)
    return failed(_conditions(options, plan))


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


def _add_diagnose(diagnose: argparse.ArgumentParser) -> None:
    takes_factory(
        diagnose,
        "Take a training step of a copy of a model in FP64, in FP32 and as mpcompile "
        "rewrites it, and report the operators that overflow, underflow or are far off, with their "
        "lines in your program, and what to keep in FP32. The exit status is 1 if --fail-on-fault "
        f"is given and something is wrong. {DEFAULTS}.",
    )
    own: dict[str, dict[str, Any]] = {
        "level": {"choices": LEVELS},
        "loss_scale": {"type": _loss_scale, "metavar": "SCALE"},
    }
    diagnose.add_argument(
        "--device", default="auto", help="cpu, cuda or cuda:N; auto: where the factory makes things"
    )
    for name in _DIAGNOSE_OPTIONS:
        add_option(diagnose, name, **own.get(name, {}))
    diagnose.add_argument("--steps", type=int, default=1, help="of AdamW; stops at the first fault")
    diagnose.add_argument(
        "--html", type=new_file, metavar="FILE", help="also write the report as one HTML file"
    )
    diagnose.add_argument("--json", action="store_true", help="print JSON")
    fault = "fail if a fault is found, or if the loss is not finite"
    diagnose.add_argument("--fail-on-fault", action="store_true", help=fault)
    diagnose.set_defaults(run=_diagnose)


def _loss_scale(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a word, which the option's own check reads


def _diagnose(options: argparse.Namespace, console: Console) -> int:
    device = known_device(options.device)
    with device or contextlib.nullcontext():  # what the loss closes over is made there, too
        model, args, kwargs, loss_fn = made_by(options.factory)
    if device is not None:
        model.to(device)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), (args, kwargs))
    chosen = given(options, _DIAGNOSE_OPTIONS)
    with console.status("a step in FP64, in FP32, and as it is rewritten"):
        report = diagnose_call(
            model, args, kwargs, loss_fn=loss_fn, steps=options.steps, options=chosen
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


FLAGS = {"plan": _add_explain, "explain": _add_explain, "diagnose": _add_diagnose}
