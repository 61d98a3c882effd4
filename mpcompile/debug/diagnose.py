"""Find what goes wrong in a model's numbers: `diagnose(model, x, loss_fn=...)`.

A copy of the model takes a training step three times, node by node: in FP64, in FP32, and as
mpcompile rewrites it. Where the last one is not finite, or far from the others, `observe/faults.py`
says which node did it, and which nodes to keep in FP32.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import ir
from ..api import recorded
from ..errors import MPCompileError, did_you_mean
from ..ir.dtypes import HALF
from ..ir.scale import INIT_SCALE, ScaleRule
from ..observe.fault import Runs
from ..observe.faults import find
from ..observe.numbers import EXPONENTS, Numbers
from ..observe.record import Record
from ..observe.watch import source_of_value
from ..optim import MPOptimizer
from ..rules.policy import Level
from ..settings import OPTIONS, Settings, check_module
from ..state import parameters
from .report import NodeNumbers, Report, Update
from .sides import Graph, Loss, Run, Side, Sides, copied

__all__ = ["diagnose", "diagnose_call"]


def diagnose(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Loss | None = None,
    steps: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Report:
    """Take a training step of a copy of the model, and report what its numbers do.

    Nothing happens to the model, its gradients, its buffers, or the random state. It takes the
    memory of three steps in eager mode, and about the time of ten.

    Args:
        model: an nn.Module with FP32 parameters; if `mpcompile()` compiled it, its options hold.
        inputs: arguments of the model's call.
        loss_fn: makes the loss of the model's result: one number with a gradient. Default: the
            result's `loss` if it has one, itself if it is one number, else the mean of all results.
        steps: how many steps to take. The report is about the first step with a fault, or the last.
        optimizer: takes the steps, as a copy with its state; default: AdamW with lr=1e-3.
        **options: those of `mpcompile()`; all others are arguments of the model's call.

    Raises:
        MPCompileError: a bad argument; a model that mpcompile refuses or that can't be copied; a
            loss_fn that returns no loss.
    """
    given = {name: options.pop(name) for name in list(options) if name in OPTIONS}
    return diagnose_call(
        model, inputs, options, loss_fn=loss_fn, steps=steps, optimizer=optimizer, options=given
    )


def diagnose_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    loss_fn: Loss | None = None,
    steps: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    options: Mapping[str, Any],
) -> Report:
    """`diagnose`, for models whose arguments may have the names of options."""
    _check(model, args, kwargs, steps)
    record = recorded(model)
    asked = {**(record.request if record else {}), **options}
    # Pads change no result, and would shift random numbers.
    settings = Settings.parse({**asked, "pad": "never", "dump": None})
    if settings.level is Level.O0:
        raise MPCompileError("level='O0' leaves everything in FP32: there is nothing to diagnose")
    held = any(parameters.owner_of(p) is not None for p in model.parameters())
    if isinstance(optimizer, MPOptimizer):
        optimizer = optimizer.inner
    twin, optimizer = copied(model, optimizer)
    check_module(twin, settings)
    if optimizer is None:
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    sides = Sides(twin, args, kwargs, loss_fn or loss_of, settings, held)
    scale = record.loss_scale.value if record and record.loss_scale.used is not None else None
    for _ in range(steps):
        report = _step(sides, optimizer, scale, type(model).__name__)
        if report.faults:
            break
    return report


def _step(
    sides: Sides, optimizer: torch.optim.Optimizer, scale: float | None, model: str
) -> Report:
    notes = []
    exact: Run | None
    try:
        exact = sides.run(Side.EXACT)
    except (RuntimeError, NotImplementedError) as error:
        exact = None
        notes.append(f"no run in FP64, so FP32 is taken as exact: {str(error).splitlines()[0]}")
    full = sides.run(Side.FULL, exact)
    low_dtype = _low_of(sides)
    low, fits = _low_run(sides, exact or full, exact, scale, low_dtype)
    faults = []
    for number, (graph, record) in enumerate(low.calls):
        in_fp64 = _same(exact, number, graph) if exact else None
        runs = Runs(record, _same(full, number, graph), in_fp64)
        assert graph.rewritten is not None
        place = sides.graphs.index(graph)
        found = find(graph.rewritten.graph, graph.plan, runs)
        faults += [dataclasses.replace(fault, graph=place) for fault in found]
    if not faults and not math.isfinite(low.loss):
        notes.append("the loss is not finite, though the model's results are: look at loss_fn")
    histogram = torch.zeros(len(EXPONENTS), dtype=torch.int64)
    for _, record in exact.calls if exact else ():
        histogram += record.histogram
    plan = next((g.plan for g in sides.graphs if g.plan.left is None), sides.graphs[0].plan)
    scaled = any(g.inputs is not None and g.inputs.scaled for g in sides.graphs)
    return Report(
        model=model, level=plan.level, dtype=plan.dtype, device=plan.device,
        faults=tuple(faults),
        losses={"low": low.loss, "fp32": full.loss} | ({"fp64": exact.loss} if exact else {}),
        scale=sides.scale if scaled else None,
        suggested_scale=fits,
        nodes=tuple(_numbers(sides, low, full)),
        histogram=tuple(histogram.tolist()),
        updates=tuple(_updates(sides.twin, low, optimizer, low_dtype)),
        optimizer=type(optimizer).__name__,
        graphs=tuple(graph.plan for graph in sides.graphs),
        notes=tuple(notes),
    )  # fmt: skip


def _check(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], steps: Any) -> None:
    if not isinstance(model, nn.Module):
        raise MPCompileError(f"diagnose({type(model).__name__}): give an nn.Module")
    if not isinstance(steps, int) or steps < 1:
        raise MPCompileError(f"steps={steps!r}: give a whole number from 1")
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        own = [*OPTIONS, "loss_fn", "steps", "optimizer"]
        hint = next(filter(None, (did_you_mean(name, own) for name in kwargs)), "")
        raise MPCompileError(f"{type(model).__name__} can't be called so: {error}{hint}") from None


def loss_of(result: Any) -> torch.Tensor:
    """The loss where the user gave no function: the result's own, or a mean."""
    own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    means = [x.float().mean() for x in ir.tensors_of(pytree.tree_leaves(result)) if x.requires_grad]
    if not means:
        raise MPCompileError("the model returns nothing that has a gradient: give a loss_fn")
    return torch.stack(means).sum()


def _low_of(sides: Sides) -> torch.dtype:
    names = [graph.plan.dtype for graph in sides.graphs if graph.plan.left is None]
    low: torch.dtype = getattr(torch, names[0]) if names else torch.float32
    return low


def _low_run(
    sides: Sides, reference: Run, exact: Run | None, live: float | None, dtype: torch.dtype
) -> tuple[Run, float | None]:
    """The run of the rewritten graphs, at the loss scale that a training would have here, and the
    largest scale that fits.
    """
    if dtype is not torch.float16:
        sides.scale = _scale(sides.settings, live, None)
        return sides.run(Side.LOW, exact), None
    # An exact gradient is at least as large as the part of it that is stored in FP16: readers in
    # FP32 add to it. So the first scale may be too low; the run itself then tells a better one.
    fits = _fitting(_largest(reference, by_source=True))
    sides.scale = _scale(sides.settings, live, fits)
    low = sides.run(Side.LOW, exact)
    measured = _fitting(_largest(low, by_source=False) / sides.scale)
    if fits is None or measured is None or measured <= fits or _overflowed(low):
        return low, fits
    before, sides.scale = sides.scale, _scale(sides.settings, live, measured)
    if sides.scale == before:
        return low, measured
    better = sides.run(Side.LOW, exact)
    if _overflowed(better):  # what was too small to be seen before
        sides.scale = before
        return low, fits
    return better, measured


def _largest(run: Run, *, by_source: bool) -> float:
    """The largest gradient of a value that is stored in FP16."""
    sizes = [0.0]
    for graph, record in run.calls:
        assert graph.rewritten is not None
        for n in graph.rewritten.graph.nodes:
            value = ir.tensor(n)
            if value is not None and value.dtype is torch.float16:
                name = source_of_value(n).name if by_source else n.name
                sizes.append(record.gradients.get(name, Numbers()).amax)
    return max(sizes)


def _overflowed(run: Run) -> bool:
    return any(n.bad for _, record in run.calls for n in record.gradients.values())


def _fitting(largest: float) -> float | None:
    """The largest power of two that keeps a gradient below the end of FP16."""
    if not largest:
        return None
    return float(2.0 ** (math.ceil(math.log2(torch.finfo(torch.float16).max / largest)) - 1))


def _scale(settings: Settings, live: float | None, fits: float | None) -> float:
    """What a training at this point would scale by."""
    given = settings.loss_scale
    if given is not None and not given.active:
        return 1.0
    if given is not None and not given.rule.dynamic:
        return given.value
    rule = given.rule if given is not None else ScaleRule()
    if live is not None:
        return live
    return max(rule.min_scale, min(INIT_SCALE, INIT_SCALE if fits is None else fits))


def _same(run: Run, number: int, graph: Graph) -> Record | None:
    """The record of the same call on another side."""
    same = number < len(run.calls) and run.calls[number][0] is graph
    return run.calls[number][1] if same else None


def _numbers(sides: Sides, low: Run, full: Run) -> Iterator[NodeNumbers]:
    for number, (graph, record) in enumerate(low.calls):
        other = _same(full, number, graph)
        for node in graph.plan.nodes:
            name = node.name
            if name not in record.values:
                continue
            yield NodeNumbers(
                graph=sides.graphs.index(graph),
                node=node,
                value=record.values[name],
                gradient=record.gradients.get(name, Numbers()),
                error=record.errors.get(name),
                error_fp32=other.errors.get(name) if other else None,
                gradient_error=record.gradient_errors.get(name),
                shares=record.shares.get(name),
                gradient_shares=record.gradient_shares.get(name),
                lost=record.lost.get(name, 0.0),
            )


def _updates(
    twin: nn.Module, low: Run, optimizer: torch.optim.Optimizer, dtype: torch.dtype
) -> Iterator[Update]:
    """Take the optimizer's step with the gradients of the low side, if they are finite."""
    parameters = dict(twin.named_parameters())
    gradients = {name: g for name, g in low.gradients.items() if g is not None}
    if any(Numbers.of(gradient).bad for gradient in gradients.values()):
        return
    before = {name: parameters[name].detach().clone() for name in gradients}
    for name, gradient in gradients.items():
        parameters[name].grad = gradient
    optimizer.step()
    twin.zero_grad()
    if dtype not in HALF:
        return
    half_unit = torch.finfo(dtype).eps / 2
    for name, old in before.items():
        ratio = ((parameters[name].detach() - old).abs() / old.abs()).flatten()
        ratio = ratio[ratio.isfinite() & (ratio > 0)]
        if len(ratio):
            stalls = float((ratio < half_unit).double().mean())
            yield Update(name, float(ratio.median()), stalls)
