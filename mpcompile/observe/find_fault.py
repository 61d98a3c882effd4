"""Which node went wrong first, and which nodes to keep in FP32 so that it doesn't.

OVERFLOW    a value is not finite, and is in FP32
BACKWARD    a gradient is not finite, and is in FP32
OWN         a value or gradient is not finite, and isn't in FP32 either: no pin helps
UNDERFLOW   a gradient has become zero
INACCURATE  a value is far off, though what it was computed from is not

A value that is not finite is often intended: the -inf of a mask. So what counts is that there are
more of them than in FP32, or, for OWN, that NaN or infinity reaches the loss or a gradient.

Faults in the backward are seen at the value whose gradient it is, and named at the operator that
made the gradient so large or so small: from reader to reader, as long as the exact gradient arrives
there like that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite, isinf, isnan

import torch
from torch import fx

from .. import ir
from ..ir.dtypes import HALF
from ..ir.scale import INIT_SCALE
from ..torch_inside.names import pytree
from .fault import NEAR, Fault, FaultKind, GraphRuns, dtype_of, low_name, text, whole
from .record import BackwardStep, Numbers


def find(case: GraphRuns) -> list[Fault]:
    """What went wrong in one run of a graph, most serious first.

    What came into the graph wrong already is no fault of this graph: not the infinite inputs that
    an earlier graph made, nor the infinite gradients of a later one or of the loss.
    """
    far_off = list(_inaccurate(case))
    found = _overflow(case) or _own(case) or _backward_overflow(case)
    return [found, *far_off] if found else [*far_off, *_underflow(case)]


# A value that is off by more than this share of its norm is a fault, if it is also off ten times as
# far as what it was computed from, and as in FP32. What FP32 itself gets so wrong is noise.
INACCURATE = 0.1


def _overflow(case: GraphRuns) -> Fault | None:
    """The first value with more elements that are not finite than in FP32."""
    for n in case.graph.nodes:
        if n.op == "placeholder" and ir.copy_of(n) is None:
            continue  # what it holds was made outside of the graph
        excess = case.excess(n)
        if excess is None:
            begins = case.is_program(n) and _is_born(case, n) and not _is_intended(n)
        else:
            begins = excess > 0 and not any((case.excess(x) or 0) > 0 for x in n.all_input_nodes)
        if begins and not ir.is_getitem(n):
            return _overflowed(case, n)
    return None


def _overflowed(case: GraphRuns, n: fx.Node) -> Fault:
    source = whole(ir.unadded(n))
    amax, low = case.amax(source.name), dtype_of(n)
    end = torch.finfo(low).max
    read_by = case.readers(n)
    pins = [reader.name for reader in read_by] if source is not n else [n.name]
    name = str(low).removeprefix("torch.")
    line = source
    if not case.is_program(source) and read_by:
        reason = f"it reads {source.name}, up to {text(amax)}, in {name}, which ends at {end:g}"
        pins, line = [reader.name for reader in read_by], read_by[0]
    elif source is not n and read_by:
        reason = (
            f"its result, up to {text(amax)}, doesn't fit {name}, which ends at {end:g}: "
            f"{read_by[0].name} reads it in {name}"
        )
    elif amax > end:
        reason = f"its result, up to {text(amax)}, doesn't fit {name}, which ends at {end:g}"
    elif flushed := _flushed_operand(case, n):
        least = text(case.known("values", flushed.name).amin)
        reason = (
            f"it reads zeros, where {flushed.name} underflowed in {low_name(flushed)}: the "
            f"smallest value there is {least}"
        )
        pins = [flushed.name, *pins]
    elif low not in HALF and (rounded := [x.name for x in _rounded(n)]):
        reason = f"its result is not finite because what it reads was rounded: {', '.join(rounded)}"
        pins = rounded
    else:
        reason = f"a sum or product inside of it leaves the range of {name}"
    # The operators in a low dtype whose values come near the end of its range in FP32.
    near = [x.name for x in case.graph.nodes if case.is_program(x) and any(case.too_large(x))]
    return case.fault(FaultKind.OVERFLOW, line, reason, amax, [*pins, *near])


def _flushed_operand(case: GraphRuns, n: fx.Node) -> fx.Node | None:
    """An operand with more zeros than in FP32."""
    for operand in n.all_input_nodes:
        source = ir.unadded(operand)
        full = case.full.values.get(source.name) if case.full else None
        if full is not None and case.value(operand).zeros > full.zeros:
            return source
    return None


def _own(case: GraphRuns) -> Fault | None:
    """The first value that FP32 is known to make infinite or NaN as well, if that does harm."""
    if case.full is None:
        return None
    results = case.graph.output_node().all_input_nodes
    harm = any(case.value(x).nans for x in results)
    harm |= any(case.value(x).bad and _is_hurt(case, x) for x in results)
    harm |= case.gradients_arrive_bad()
    inputs = case.graph.find_nodes(op="placeholder")
    if not harm or any((case.excess(x) or 0) > 0 for x in inputs):
        return None
    for of_nans in (True, False):
        for n in case.graph.nodes:
            if case.is_program(n) and _is_born(case, n, nans=of_nans) and not _is_intended(n):
                return case.fault(FaultKind.OWN, n, _why_own(case, n))
    return None


def _is_hurt(case: GraphRuns, result: fx.Node) -> bool:
    """Whether an infinite result does harm: by the loss, or else by the gradient that it gets."""
    if case.loss is not None:
        return not isfinite(case.loss)
    return bool(case.low.gradients.get(result.name, Numbers()).bad)


def _why_own(case: GraphRuns, n: fx.Node) -> str:
    word = "NaN" if case.value(n).nans else "infinite"
    bad = [x for x in n.all_input_nodes if case.value(x).bad]
    if given := [x.name for x in bad if x.op == "placeholder"]:
        return f"it reads {given[0]}, an input of the graph that is not finite itself"
    reason = f"it makes {word} of {'infinite' if bad else 'finite'} values, and does so in FP32"
    if bad and "softmax" in ir.op_name(n):
        reason += ": a row is masked out completely"
    return reason + "; the precision has no part in it"


def _is_born(case: GraphRuns, n: fx.Node, *, nans: bool = False) -> bool:
    """Whether a value is not finite (NaN), though what the node reads is."""
    what = "nans" if nans else "bad"
    own, *read = (getattr(case.value(x), what) for x in (n, *n.all_input_nodes))
    return bool(own) and not any(read)


def _is_intended(n: fx.Node) -> bool:
    """Whether the program itself writes inf or nan there: a mask, a constant."""
    numbers = [x for x in pytree.tree_leaves((n.args, n.kwargs)) if isinstance(x, float)]
    return any(isinf(x) or isnan(x) for x in numbers) or ir.is_constant(n)


def _inaccurate(case: GraphRuns) -> Iterator[Fault]:
    """The values that are far off, though what they were computed from is not."""
    errors = case.low.errors
    for n in case.graph.nodes:
        error, line = errors.get(n.name, 0.0), case.lines.get(n.name)
        if line is None or error < INACCURATE:
            continue
        if ir.is_cast(n) and 10 * errors.get(n.all_input_nodes[0].name, 0.0) < error:
            yield _rounded_away(case, n, error)
        if line.is_added:
            continue
        read = max((errors.get(operand.name, 0.0) for operand in n.all_input_nodes), default=0)
        full = case.full.errors.get(n.name, 0.0) if case.full else 0.0
        if 10 * max(read, full) > error or full > INACCURATE:
            continue
        reason = (
            f"its result is off by {error:.0%}, what it reads by {read:.2%}, and in FP32 it is "
            f"off by {full:.2%}: it makes much of little differences"
        )
        pins = [*(x.name for x in _rounded(n)), n.name]
        yield case.fault(FaultKind.INACCURATE, n, reason, case.amax(n.name), pins)


def _rounded_away(case: GraphRuns, n: fx.Node, error: float) -> Fault:
    """Of a cast: the values are too small for the dtype that a reader wants."""
    value = ir.unadded(n)
    read_by = case.readers(n)
    amax, name = case.amax(value.name), low_name(n)
    reason = f"its result, up to {text(amax)}, is off by {error:.0%} once rounded to {name}"
    if read_by:
        reason += f", in which {read_by[0].name} reads it"
    line = value if case.is_program(value) or not read_by else read_by[0]
    return case.fault(FaultKind.INACCURATE, line, reason, amax, [reader.name for reader in read_by])


def _rounded(n: fx.Node) -> Iterator[fx.Node]:
    """The operators whose results went through a low dtype last, on the way to a node."""

    def is_low(x: fx.Node) -> bool:
        return x is not n and dtype_of(x) in HALF

    above = ir.reached([n], lambda x: () if is_low(x) else x.all_input_nodes)
    return map(ir.unadded, filter(is_low, above))


# -- the backward ----------------------------------------------------------------------------------

# A gradient of which this share of the elements is lost, and that is off by as much, is a fault.
LOST = 0.5


def _backward_overflow(case: GraphRuns) -> Fault | None:
    """The first step of the backward that made of finite gradients some that are not."""
    full = case.full.steps if case.full is not None else ()
    own = {step.node for step in full if _makes_bad(step)}
    step = next(filter(_makes_bad, case.low.steps), None)
    if step is None or not case.gradients_arrive_bad():
        return None
    n = case.nodes[step.node]
    if step.node in own or ir.unadded(n).name in own:
        reason = (
            f"its backward ({step.name}) makes gradients that are not finite, and does so in "
            "FP32; the precision has no part in it"
        )
        return case.fault(FaultKind.OWN, n, reason)
    return _gradient_overflowed(case, n, step)


def _makes_bad(step: BackwardStep) -> bool:
    return bool(step.passed_on.bad) and not step.received.bad


def _gradient_overflowed(case: GraphRuns, n: fx.Node, step: BackwardStep) -> Fault:
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
    return case.fault(FaultKind.BACKWARD, made, reason, amax, pins)


def _overflowed_inside(case: GraphRuns, n: fx.Node, step: BackwardStep) -> Fault:
    """Of an operator that computes in a low dtype, and whose backward leaves its range."""
    sizes = {x.name: case.gradient_amax(x.name) for x in map(ir.unadded, n.all_input_nodes)}
    amax = max((size for size in sizes.values() if size < float("inf")), default=float("inf"))
    reason = f"its backward ({step.name}) makes gradients that are not finite"
    large = [name for name, size in sizes.items() if size == amax]
    return case.fault(FaultKind.BACKWARD, n, reason, amax, [n.name, *large, *_too_steep(case)])


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


def _steep(case: GraphRuns, limit: float | None = None) -> list[fx.Node]:
    """The nodes in a low dtype whose exact gradient is above a limit, without the loss scale;
    default: half of what fits.
    """

    def is_steep(n: fx.Node) -> bool:
        end = NEAR * torch.finfo(dtype_of(n)).max if limit is None else limit
        return end < case.gradient_amax(ir.unadded(n).name) < float("inf")

    return [n for n in case.graph.nodes if dtype_of(n) in HALF and is_steep(n)]


def _too_steep(case: GraphRuns, limit: float | None = None) -> Iterator[str]:
    """What must be in FP32 so that no gradient above the limit is in a low dtype."""
    for n in _steep(case, limit):
        yield from _around(case, ir.unadded(n), n)


def _underflow(case: GraphRuns) -> Iterator[Fault]:
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
        return case.fault(FaultKind.UNDERFLOW, made, reason, size, _too_steep(case, limit))
    faint = max(amax, info.smallest_normal * info.eps / scale)
    made = _origin(case, value, n, lambda size: size <= faint)
    reason = (
        f"{gone} that it passes to {value.name}, up to {text(amax)} without the loss scale, become "
        f"zero in {low}{at}"
    )
    return case.fault(FaultKind.UNDERFLOW, made, reason, amax, _around(case, value, n))
