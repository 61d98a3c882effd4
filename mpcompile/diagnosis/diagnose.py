"""Find what goes wrong in a model's numbers: `diagnose(model, x, loss_fn=...)`.

A copy of the model takes a training step three times, node by node: in FP64, in FP32, and as
mpcompile rewrites it. Where the last one is not finite, or far from the others,
`observe/find_fault.py` says which node did it, and which nodes to keep in FP32.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import ir
from ..compiler.training import owned_in
from ..errors import MPCompileError
from ..ir.dtypes import HALF
from ..observe.fault import Fault, FaultKind, GraphRuns
from ..observe.find_fault import INACCURATE, find
from ..observe.record import EXPONENTS, Numbers, Record
from ..observe.watch import relative_error
from ..planner.plan_data import PlanNode
from ..rules.policy import Level
from ..runtime.check_module import check_call, check_module, deep_copy, for_weights
from ..runtime.records import pinned_in, recorded, studied
from ..settings import OPTIONS, Settings
from ..torch_inside.names import pytree
from ..torch_inside.owned_backend import nothing_compiled
from .check_arguments import check_loss_fn, check_optimizer, check_trained, not_finite_in
from .report import NodeNumbers, Report, UpdateErrors
from .sides import Loss, Run, Sides, low_dtype_of, run_low

# These count only if a parameter's gradient is far off.
HARMLESS_ALONE = (FaultKind.INACCURATE, FaultKind.UNDERFLOW)


def diagnose(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Loss | None = None,
    steps: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Report:
    """Take a training step of a copy of the model, and report what its numbers do.

    Nothing happens to the model, its gradients, its buffers, or the random state. It takes
    three steps in eager mode, one of them in FP64, and keeps the values of that one.

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
    model = studied(model, "diagnose")
    if not isinstance(steps, int) or steps < 1:  # type: ignore[redundant-expr]
        raise MPCompileError(f"steps={steps!r}: give a whole number from 1")
    check_call(model, args, kwargs, options_of=diagnose, more=OPTIONS)
    check_trained(model, "diagnose")
    check_loss_fn(loss_fn, "result", "lambda result: F.cross_entropy(result, y)")
    sides, optimizer = sides_of(
        model, options, "diagnose", check_optimizer(optimizer, model), args, kwargs, loss_fn
    )
    optimizer = optimizer or _default_optimizer(sides.twin)
    record = recorded(model)
    scale = record.loss_scale.value if record and record.loss_scale.used is not None else None
    for _ in range(steps):
        report = _step(sides, optimizer, scale, type(model).__name__)
        if report.faults:
            break
    return report


def sides_of(
    model: nn.Module,
    options: Mapping[str, Any],
    what_for: str,
    optimizer: torch.optim.Optimizer | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Loss | None = None,
) -> tuple[Sides, torch.optim.Optimizer | None]:
    """The sides of a copy of a model, with the options that it was compiled with and these; and a
    copy of the optimizer.

    Raises:
        MPCompileError: a bad option, or a model that mpcompile refuses or that can't be copied.
    """
    record = recorded(model)
    asked = {**(record.request if record else {}), **options}
    # Pads change no result, and would shift random numbers.
    settings = for_weights(Settings.parse({**asked, "pad": "never", "dump": None}), model)
    if settings.level is Level.O0:
        why = "leaves everything in FP32: there is nothing to"
        raise MPCompileError(f"level='O0' {why} {what_for}")
    held = bool(owned_in(list(model.parameters())))
    why = "only a copy is diagnosed, so that nothing happens to the model"
    twin, optimizer = deep_copy((model, optimizer), {}, model, why)
    check_module(twin, settings)
    loss = loss_fn or loss_of
    return Sides(twin, args, kwargs or {}, loss, settings, held, pinned_in(model)), optimizer


def _step(sides: Sides, optimizer: torch.optim.Optimizer, live: float | None, model: str) -> Report:
    notes: list[str] = []
    exact: Run | None = None
    try:
        exact = sides.run("fp64")
    except (RuntimeError, NotImplementedError) as error:
        notes.append(f"no run in FP64, so FP32 is taken as exact: {str(error).splitlines()[0]}")
    sides.keep = exact is None
    full = sides.run("fp32", exact)
    if not sides.plans:
        raise nothing_compiled(model)
    low, fits = run_low(sides, full, exact, live)
    faults = _faults(sides, low, full, exact)
    histogram, zeros = torch.zeros(len(EXPONENTS), dtype=torch.int64), 0
    for _, record in (exact or full).calls:
        histogram += record.histogram
        zeros += record.zeros
    plan = next((plan for plan in sides.plans if plan.left is None), sides.plans[0])
    scaled = any(graph.inputs.scaled for graph, _ in low.calls)
    report = Report(
        model=model, level=plan.level, dtype=plan.dtype, device=plan.device,
        faults=faults,
        losses={"low": low.loss, "fp32": full.loss} | ({"fp64": exact.loss} if exact else {}),
        scale=sides.scale if scaled else None,
        suggested_scale=fits,
        nodes=tuple(_numbers(sides, low, full)),
        histogram=tuple(histogram.tolist()),
        zeros=zeros,
        updates=tuple(_updates(sides.twin, low.gradients, optimizer, low_dtype_of(sides))),
        optimizer=type(optimizer).__name__,
        graphs=tuple(sides.plans),
        notes=(*notes, *_notes(sides, low, full, faults)),
    )  # fmt: skip
    sides.advance(low)
    return report


def _faults(sides: Sides, low: Run, full: Run, exact: Run | None) -> tuple[Fault, ...]:
    """What went wrong in each graph, in the order in which it did."""
    found = []
    for number, (graph, record) in enumerate(low.calls):
        case = GraphRuns(
            graph.rewritten.graph, graph.plan, record, full.record_of(number, graph),
            exact.record_of(number, graph) if exact else None,
            scale=sides.scale if graph.inputs.scaled else 1.0, loss=low.loss,
        )  # fmt: skip
        place = sides.plans.index(graph.plan)
        found += [
            dataclasses.replace(fault, graph=place, node=_here(fault.node, record))
            for fault in find(case)
        ]
    broken = [fault for fault in found if fault.kind not in HARMLESS_ALONE]
    if math.isfinite(low.loss):
        broken.reverse()  # the backward went wrong, which begins with the last graph
    first = broken[:1]  # what is not finite in FP32 either, makes more of its kind later on
    broken = first + [fault for fault in broken[1:] if fault.kind is not FaultKind.OWN]
    rest = [fault for fault in found if fault.kind in HARMLESS_ALONE]
    return (*broken, *(rest if _is_off(low, full, exact or full) else ()))


def _here(node: PlanNode, record: Record) -> PlanNode:
    return dataclasses.replace(node, module=record.path_of(node.module))


def _is_off(low: Run, full: Run, exact: Run) -> bool:
    """Whether the gradient of a parameter is far off, and not in FP32 as well, as where its terms
    cancel.
    """
    for name in exact.gradients:
        found = [run.gradients.get(name) for run in (low, full, exact)]
        ours, theirs, wanted = (None if g is None else g.to_dense() for g in found)
        if wanted is None or ours is None or theirs is None or not wanted.count_nonzero():
            continue
        error = relative_error([ours], [wanted])
        rounding = relative_error([theirs], [wanted])
        if error >= INACCURATE > rounding or Numbers.of(ours).bad:
            return True
    return False


def _notes(sides: Sides, low: Run, full: Run, faults: Sequence[Fault]) -> Iterator[str]:
    for left in dict.fromkeys(plan.left for plan in sides.plans if plan.left is not None):
        yield f"a graph was left in FP32, and not looked at: {left}"
    known = Counter(node.name for plan in sides.plans for node in plan.nodes)
    common = [name for fault in faults for name in fault.pins if known[name] > 1]
    if common:
        yield (
            f"{', '.join(dict.fromkeys(common))}: several graphs have a node of this name, and "
            "Policy(nodes=...) pins it in each; Policy(modules=...) pins the one module"
        )
    bad = Numbers.of([*low.gradients.values()]).bad
    if (bad or not math.isfinite(low.loss)) and (came_in := list(not_finite_in(sides))):
        yield from came_in
        return
    if any(fault.kind not in HARMLESS_ALONE for fault in faults):
        return
    if not math.isfinite(low.loss):
        also = ", in FP32 either" if not math.isfinite(full.loss) else ""
        yield (
            f"the loss is not finite{also}, though the model's results are: look at the targets, "
            "and at loss_fn"
        )
    elif bad:
        also = ", in FP32 either" if Numbers.of([*full.gradients.values()]).bad else ""
        yield (
            f"gradients are not finite{also}, and begin outside of the graphs: look at loss_fn, "
            "and at what runs between graphs"
        )


def loss_of(result: Any) -> torch.Tensor:
    """The loss where the user gave no function: the result's own, or a mean."""
    own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    means = [x.float().mean() for x in ir.tensors_of(pytree.tree_leaves(result)) if x.requires_grad]
    if not means:
        raise MPCompileError("the model returns nothing that has a gradient: give a loss_fn")
    return torch.stack(means).sum()


def _known(errors: dict[str, float], seen: dict[str, Numbers], name: str) -> float | None:
    """An error is that of the finite elements: None where there are none."""
    found = seen.get(name)
    return None if found and found.bad == found.count else errors.get(name)


def _numbers(sides: Sides, low: Run, full: Run) -> Iterator[NodeNumbers]:
    for number, (graph, record) in enumerate(low.calls):
        other = full.record_of(number, graph)
        for node in (n for n in graph.plan.nodes if n.name in record.values):
            name = node.name
            yield NodeNumbers(
                graph=sides.plans.index(graph.plan),
                node=_here(node, record),
                value=record.values[name],
                gradient=record.gradients.get(name, Numbers()),
                error=_known(record.errors, record.values, name),
                error_fp32=_known(other.errors, other.values, name) if other else None,
                gradient_error=_known(record.gradient_errors, record.gradients, name),
                shares=record.shares.get(name),
                gradient_shares=record.gradient_shares.get(name),
                lost=record.lost.get(name, 0.0),
            )


def _default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, also for sparse gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def densify(*_: object) -> None:
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad.to_dense()

    optimizer.register_step_pre_hook(densify)
    return optimizer


def _updates(
    twin: nn.Module,
    gradients: Mapping[str, torch.Tensor | None],
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype,
) -> Iterator[UpdateErrors]:
    """Take a step with these gradients, if they are finite; how far it moved each parameter.

    Args:
        twin: the model; its parameters are changed.
        gradients: by the parameter's name, FP32 and unscaled.
        optimizer: holds the parameters.
        dtype: the low dtype.
    """
    parameters = dict(twin.named_parameters())
    given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    if Numbers.of([*given.values()]).bad:
        return
    before = {name: parameters[name].detach().clone() for name in given}
    for name, gradient in given.items():
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
            yield UpdateErrors(name, float(ratio.median()), stalls)
