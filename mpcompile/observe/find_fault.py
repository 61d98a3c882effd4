"""Which node went wrong first, and which nodes to keep in FP32 so that it doesn't.

OVERFLOW    a value is not finite, and is in FP32
BACKWARD    a gradient is not finite, and is in FP32
OWN         a value or gradient is not finite, and isn't in FP32 either: no pin helps
UNDERFLOW   a gradient has become zero
INACCURATE  a value is far off, though what it was computed from is not

Faults in the forward are found here, those in the backward by `backward_faults.py`. A value that is
not finite is often intended: the -inf of a mask. So what counts is that there are more of them than
in FP32, or, for OWN, that NaN or infinity reaches the loss or a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, isinf, isnan

import torch
from torch import fx

from .. import ir
from ..ir.dtypes import HALF
from ..torch_inside.names import pytree
from . import backward_faults
from .fault import NEAR, Fault, FaultKind, GraphRuns, dtype_of, low_name, text
from .record import Numbers


def find(case: GraphRuns) -> list[Fault]:
    """What went wrong in one run of a graph, most serious first.

    What came into the graph wrong already is no fault of this graph: not the infinite inputs that
    an earlier graph made, nor the infinite gradients of a later one or of the loss.
    """
    far_off = list(_inaccurate(case))
    found = _overflow(case) or _own(case) or backward_faults.overflow(case)
    return [found, *far_off] if found else [*far_off, *backward_faults.underflow(case)]


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
    source = ir.unadded(n)
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
    return case.fault(FaultKind.OVERFLOW, line, reason, amax, [*pins, *_too_large(case)])


def _flushed_operand(case: GraphRuns, n: fx.Node) -> fx.Node | None:
    """An operand with more zeros than in FP32."""
    for operand in n.all_input_nodes:
        source = ir.unadded(operand)
        full = case.full.values.get(source.name) if case.full else None
        if full is not None and case.value(operand).zeros > full.zeros:
            return source
    return None


def _too_large(case: GraphRuns) -> Iterator[str]:
    """The operators in a low dtype whose values come near the end of its range in FP32."""
    for n in case.graph.nodes:
        if not case.is_program(n):
            continue
        low = [x for x in (n, *n.all_input_nodes) if dtype_of(x) in HALF]
        end = NEAR * torch.finfo(dtype_of(low[0])).max if low else 0.0
        if any(end < case.amax(ir.unadded(x).name) < float("inf") for x in low):
            yield n.name


def _own(case: GraphRuns) -> Fault | None:
    """The first value that FP32 is known to make infinite or NaN as well, if that does harm."""
    if case.full is None:
        return None
    results = case.graph.output_node().all_input_nodes
    loss = case.loss
    harm = any(case.value(x).nans for x in results)
    harm |= any(case.value(x).bad and _is_hurt(case, x, loss) for x in results)
    harm |= case.gradients_arrive_bad()
    inputs = case.graph.find_nodes(op="placeholder")
    if not harm or any((case.excess(x) or 0) > 0 for x in inputs):
        return None
    for of_nans in (True, False):
        for n in case.graph.nodes:
            if case.is_program(n) and _is_born(case, n, nans=of_nans) and not _is_intended(n):
                return case.fault(FaultKind.OWN, n, _why_own(case, n))
    return None


def _is_hurt(case: GraphRuns, result: fx.Node, loss: float | None) -> bool:
    """Whether an infinite result does harm: by the loss, or else by the gradient that it gets."""
    if loss is not None:
        return not isfinite(loss)
    return bool(case.low.gradients.get(result.name, Numbers()).bad)


def _why_own(case: GraphRuns, n: fx.Node) -> str:
    word = "NaN" if case.value(n).nans else "infinite"
    read = [case.value(operand) for operand in n.all_input_nodes]
    reason = f"it makes {word} of finite values, and does so in FP32"
    given = [x.name for x in n.all_input_nodes if x.op == "placeholder" and case.value(x).bad]
    if given:
        return f"it reads {given[0]}, an input of the graph that is not finite itself"
    if any(numbers.bad for numbers in read):
        reason = f"it makes {word} of infinite values, and does so in FP32"
        if "softmax" in ir.op_name(n):
            reason += ": a row is masked out completely"
    return reason + "; the precision has no part in it"


def _is_born(case: GraphRuns, n: fx.Node, *, nans: bool = False) -> bool:
    """Whether a value is not finite (NaN), though what the node reads is."""
    found = case.value(n)
    read = [case.value(operand) for operand in n.all_input_nodes]
    if nans:
        return bool(found.nans) and not any(numbers.nans for numbers in read)
    return bool(found.bad) and not any(numbers.bad for numbers in read)


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
    seen, queue = {n}, [n]
    while queue:
        for operand in queue.pop().all_input_nodes:
            if operand in seen:
                continue
            seen.add(operand)
            if dtype_of(operand) in HALF:
                yield ir.unadded(operand)
            else:
                queue.append(operand)
