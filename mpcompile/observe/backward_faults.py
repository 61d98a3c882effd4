"""Faults in the backward: a gradient that is not finite, or that is lost.

Both are seen at the value whose gradient it is, and named at the operator that made the gradient so
large or so small: from reader to reader, as long as the exact gradient arrives there like that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from .. import ir
from ..ir.dtypes import HALF
from ..ir.scale import INIT_SCALE
from .fault import NEAR, Fault, FaultKind, GraphRuns, dtype_of, low_name, text
from .record import BackwardStep

# A gradient of which this share of the elements is lost, and that is off by as much, is a fault.
LOST = 0.5


def overflow(case: GraphRuns) -> Fault | None:
    """The first step of the backward that made of finite gradients some that are not."""
    full = case.full.steps if case.full is not None else ()
    own = {step.node for step in full if _overflows(step)}
    if not case.gradients_arrive_bad():
        return None
    for step in case.low.steps:
        if not _overflows(step):
            continue
        n = case.nodes[step.node]
        value = ir.unadded(n)
        if step.node in own or value.name in own:
            reason = (
                f"its backward ({step.name}) makes gradients that are not finite, and does so in "
                "FP32; the precision has no part in it"
            )
            return case.fault(FaultKind.OWN, n, reason, step=step)
        return _overflowed(case, n, step)
    return None


def _overflows(step: BackwardStep) -> bool:
    return bool(step.passed_on.bad) and not step.received.bad


def _overflowed(case: GraphRuns, n: fx.Node, step: BackwardStep) -> Fault:
    value = ir.unadded(n)
    if value is n:
        return _overflowed_inside(case, n, step)
    amax, name = case.gradient_amax(value.name), low_name(value)
    end = torch.finfo(getattr(torch, name)).max / case.scale
    made = _origin(case, value, n, lambda size: size > end)
    size = f"up to {text(amax)} without the loss scale, " if amax < float("inf") else ""
    reason = f"the gradient that it passes to {value.name}, {size}doesn't fit {name}"
    if case.scale != 1:
        reason += f" at a loss scale of {case.scale:g}"
    pins = [*_around(case, value, n), *_too_steep(case)]
    return case.fault(FaultKind.BACKWARD, made, reason, amax, pins, _inner_step(case, made))


def _overflowed_inside(case: GraphRuns, n: fx.Node, step: BackwardStep) -> Fault:
    """Of an operator that computes in a low dtype, and whose backward leaves its range."""
    read = {ir.unadded(x).name for x in n.all_input_nodes}
    sizes = {name: case.gradient_amax(name) for name in read}
    amax = max((size for size in sizes.values() if size < float("inf")), default=float("inf"))
    reason = f"its backward ({step.name}) makes gradients that are not finite"
    large = [name for name, size in sizes.items() if size == amax]
    return case.fault(
        FaultKind.BACKWARD, n, reason, amax, [n.name, *large, *_too_steep(case)], step
    )


def _origin(
    case: GraphRuns, value: fx.Node, through: fx.Node, is_so: Callable[[float], bool]
) -> fx.Node:
    """The operator that makes the gradient so large, or so small, that `is_so` holds: of a value,
    which is read `through` a cast, or itself.
    """
    made, read = value, through
    while reader := case.who_passed(read):
        made = read = reader
        arrives = case.gradient_amax(reader.name)
        if arrives == float("inf") or not is_so(arrives):
            break
    return made


def _around(case: GraphRuns, value: fx.Node, stored: fx.Node) -> list[str]:
    """What must be in FP32 so that the gradient of a value never is in a low dtype: the operator
    that makes the value, if it makes it in one, and those that read it in one.
    """
    read_by = [x for x in case.readers(stored) if case.lines[x.name].precision == "LOW"]
    return [x.name for x in ([value] if dtype_of(value) in HALF else []) + read_by]


def _inner_step(case: GraphRuns, n: fx.Node) -> BackwardStep | None:
    """The operator inside of a user's backward where the gradient gets its size."""
    steps = [step for step in case.steps.get(n.name, ()) if step.frames]
    largest = max((step.passed_on.amax for step in steps), default=0.0)
    return next((step for step in steps if step.passed_on.amax >= NEAR * largest), None)


def _steep(case: GraphRuns, limit: float | None = None) -> list[fx.Node]:
    """The nodes in a low dtype whose exact gradient is above a limit, without the loss scale;
    default: half of what fits.
    """
    found = []
    for n in case.graph.nodes:
        if dtype_of(n) in HALF:
            end = NEAR * torch.finfo(dtype_of(n)).max if limit is None else limit
            if end < case.gradient_amax(ir.unadded(n).name) < float("inf"):
                found.append(n)
    return found


def _too_steep(case: GraphRuns, limit: float | None = None) -> Iterator[str]:
    """What must be in FP32 so that no gradient above the limit is in a low dtype."""
    for n in _steep(case, limit):
        yield from _around(case, ir.unadded(n), n)


def underflow(case: GraphRuns) -> Iterator[Fault]:
    """The first gradient, in the order of the backward, that is lost."""
    for n in reversed(list(case.graph.nodes)):
        if _is_lost(case, n) and _matters(case, n):
            yield _lost(case, n)
            return


def _is_lost(case: GraphRuns, n: fx.Node) -> bool:
    low, full = case.low, case.full
    own = full.gradient_errors.get(ir.unadded(n).name, 0.0) if full is not None else 0.0
    error = low.gradient_errors.get(n.name, 0.0)
    # Where large terms cancel, roundings alone make an error, larger than FP32's by the ratio of
    # the units.
    rounding = own * torch.finfo(dtype_of(n)).eps / torch.finfo(torch.float32).eps
    return low.lost.get(n.name, 0.0) >= LOST and error >= LOST and error > rounding


def _matters(case: GraphRuns, n: fx.Node) -> bool:
    """Whether the gradient of an input of the graph is off because of it."""
    above = ir.all_before(n.all_input_nodes)
    leaving = [x.name for x in above if ir.unadded(x).op == "placeholder"]
    errors = case.low.gradient_errors
    known = [errors[name] for name in leaving if name in errors]
    return not known or max(known) >= LOST


def _lost(case: GraphRuns, n: fx.Node) -> Fault:
    value, scale, low = ir.unadded(n), case.scale, low_name(n)
    amax, lost = case.gradient_amax(value.name), case.low.lost[n.name]
    info = torch.finfo(getattr(torch, low))
    at = f" at a loss scale of {scale:g}" if scale != 1 else ""
    gone = f"{lost:.0%} of the gradient"
    steep = _steep(case, info.max / scale / 4)
    if steep and amax * INIT_SCALE > info.smallest_normal:
        # Without the steep gradients, the scale would be high enough for this one.
        limit = info.max * amax / info.smallest_normal
        first = max(steep, key=lambda x: case.gradient_amax(ir.unadded(x).name))
        source = ir.unadded(first)
        size = case.gradient_amax(source.name)
        made = _origin(case, source, first, lambda g: g > limit)
        reason = (
            f"the gradient that it passes to {source.name}, up to {text(size)}, fits {low} only"
            f"{at}, where {gone} of {value.name}, up to {text(amax)}, become zero"
        )
        pins, inner = _too_steep(case, limit), _inner_step(case, made)
        return case.fault(FaultKind.UNDERFLOW, made, reason, size, pins, inner)
    faint = max(amax, info.smallest_normal * info.eps / scale)
    made = _origin(case, value, n, lambda size: size <= faint)
    reason = (
        f"{gone} that it passes to {value.name}, up to {text(amax)} without the loss scale, become "
        f"zero in {low}{at}"
    )
    inner = _inner_step(case, made)
    return case.fault(FaultKind.UNDERFLOW, made, reason, amax, _around(case, value, n), inner)
