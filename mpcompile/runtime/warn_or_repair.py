"""What is done about an overflow that comes in every step: a warning, or a repair."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterable

from .. import logs
from ..errors import MPCompileWarning
from ..ir.places import Place
from ..observe.fault import Fault, Kind
from ..scaling import guard
from ..scaling.loss_scale import LossScale
from ..scaling.not_finite import came_in, outside
from ..scaling.repairs import MOST
from ..scaling.skips_in_a_row import Verdict
from ..torch_inside.dynamo import reset_code
from .watched_call import Look, Watched

__all__ = ["judge"]

_DIAGNOSE = "mpcompile.diagnose(model, inputs, loss_fn=...)"
_ORDER = (Kind.OVERFLOW, Kind.OWN, Kind.BACKWARD)  # what comes later follows from what comes before


def judge(scale: LossScale) -> Verdict:
    """Name the first node that overflowed in the watched step, and repair it if the user wants."""
    looks: Iterable[Look] = scale.trouble.looks
    seen = [look.seen() for look in looks]
    scale.trouble.fed = came_in(seen)
    if (what := outside(seen)) is not None:
        scale.said.not_finite(what)
        return Verdict.WAIT
    faults = [(fault, look.graph) for look in looks if (fault := look.fault()) is not None]
    if not faults:
        if scale.trouble.at_floor:
            scale.said.at_floor(scale.min_scale)
        return Verdict.WAIT
    fault, graph = min(faults, key=lambda found: _ORDER.index(found[0].kind))
    # Behind a value that is meant to be infinite, a scale that is too high may be all there is.
    at_lower_scale = fault.kind in (Kind.BACKWARD, Kind.OWN)
    if at_lower_scale and scale.trouble.may_still_fall():
        return Verdict.WAIT
    fault = dataclasses.replace(fault, pins=_low(fault.pins, graph))
    if not graph.repair:
        _warn(scale, fault, _advice(fault))
        return Verdict.TOLD
    return _repair(scale, fault, graph)


def _repair(scale: LossScale, fault: Fault, graph: Watched) -> Verdict:
    pins = graph.places(fault.pins)
    if (why := _why_not(scale, pins, graph)) is not None:
        made = f"; it has made {len(scale.repairs.events)} repairs" if scale.repairs.events else ""
        _warn(scale, fault, f"repair=True does nothing about it: {why}{made}")
        return Verdict.TOLD
    event = f"{_named(fault)}; pinned to FP32: {', '.join(pins)}"
    scale.repairs.add(event, {place: _reason(fault, name) for name, place in pins.items()})
    logs.event(
        "repair", logging.WARNING, "repaired", "after %(skipped)d skipped steps: %(fault)s",
        skipped=scale.trouble.skipped, fault=event, pins=list(pins),
    )  # fmt: skip
    _restore(scale)
    assert graph.code is not None
    reset_code(graph.code)
    return Verdict.REPAIRED


def _why_not(scale: LossScale, pins: dict[str, Place], graph: Watched) -> str | None:
    if not pins:
        return "no operator can be kept in FP32 against it"
    if scale.repairs.pins.keys() >= set(pins.values()):
        return f"{', '.join(pins)} are in FP32 already"
    if scale.repairs.used_up:
        return f"{MOST} repairs are the most that it makes"
    if guard.decide_alike():
        return "each process would repair by itself, and all of a group must run the same program"
    if graph.code is None:
        return "torch.compile did not compile this graph"
    return None


def _restore(repaired: LossScale) -> None:
    """Set back the scale, and those that it may have brought down with it, to where they were at
    their last good step: it was not their fault. While its start is searched for, a scale has not
    moved.
    """
    for scale in guard.scales():
        before = scale.trouble.before
        mine = scale is repaired or _depends(scale, repaired)
        if mine and scale.trouble.skipped and before is not None and not scale.fitting:
            state = dataclasses.replace(
                scale.state, scale=before, good_steps=0, overflows_left=scale.hysteresis
            )
            scale.live.set(state)


def _depends(scale: LossScale, other: LossScale) -> bool:
    """Whether a scale's steps may be skipped for what the graphs of another one made: an optimizer
    looks at both, or something that wasn't finite came into its graphs, as into a critic's from the
    generator before it, and into the generator's backward from the critic's.
    """
    if set(scale.overflows.looks) & set(other.overflows.looks):
        return True
    looks: Iterable[Look] = scale.trouble.looks  # it may be judged later than the other one
    return scale.trouble.fed or came_in([look.seen() for look in looks])


def _warn(scale: LossScale, fault: Fault, advice: str) -> None:
    lowest = scale.rule.dynamic and scale.value <= scale.min_scale
    more = f" {_DIAGNOSE} shows all of it." if fault.kind is Kind.BACKWARD else ""
    at = f"at its floor ({scale.min_scale:g})" if lowest else f"{scale.value:g}"
    steps = scale.trouble.skipped
    skipped = f"{steps} optimizer steps in a row were" if steps > 1 else "An optimizer step was"
    warnings.warn(
        f"{skipped} skipped. What overflows first: {_named(fault)}. {advice}.{more} "
        f"The loss scale is {at}.",
        MPCompileWarning,
        stacklevel=2,
    )


def _named(fault: Fault) -> str:
    """`block.3.fc2 (model.py:12), linear_7 = aten::linear: its result, up to ...`."""
    node = fault.node
    where = (node.module or "the model itself") + (f" ({node.source})" if node.source else "")
    return f"{where}, {node.name} = {node.op}: {fault.reason}"


def _advice(fault: Fault) -> str:
    if not fault.pins:
        if fault.kind is Kind.OWN:
            return "No policy helps against that"
        return "It runs in FP32 already: keep what feeds it in FP32, too, by a policy"
    pins = ", ".join(f"{name!r}: 'fp32'" for name in fault.pins)
    return f"Keep it in FP32 by policy=Policy(nodes={{{pins}}}), or compile with repair=True"


def _low(pins: Iterable[str], graph: Watched) -> tuple[str, ...]:
    full = {line.name for line in graph.plan.nodes if line.precision == "FULL"}
    return tuple(name for name in pins if name not in full)


def _reason(fault: Fault, name: str) -> str:
    """Why a node is pinned, for the plan."""
    if name == fault.node.name:
        return f"pinned by repair=True: {fault.reason}"
    return f"pinned by repair=True, together with {fault.node.name}: {fault.reason}"
