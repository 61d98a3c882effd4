"""Make a step that must be skipped change nothing. A rewriting pass.

    copy_(param0, new)      ->      kept = where(skip, param0, new); copy_(param0, kept)

All writes of parameters and of the optimizer's state (moments and step counters) are selected this
way. `skip` is a value on the device, so the host doesn't wait for it. In the fused update this
costs no memory traffic: the old value is read in any case.

A parameter that has no gradient in this step (`StepConfig.optional`) is left alone alike:

    copy_(param0, new)      ->      still = logical_or(skip, absent0)
                                    kept = where(still, param0, new); copy_(param0, kept)
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import Slot, StepConfig

_PREDICATED = ("param", "state")


def predicate_writes(gm: fx.GraphModule, config: StepConfig) -> bool:
    if not (config.checked or config.optional):
        return False
    changed = False
    conditions: dict[int, fx.Node] = {}  # for each parameter, whether it is left alone
    for write, target, value in ir.writes(gm.graph):
        slot = ir.slot_of(target)
        if slot.kind not in _PREDICATED:
            continue
        changed = True
        with gm.graph.inserting_before(write):
            if slot.index not in conditions:
                conditions[slot.index] = _condition(gm, config, slot.index)
            if ir.dtype(value) is not ir.dtype(target):
                dtype, why = ir.dtype(target), "as it is stored"
                value = ir.call(gm.graph, aten._to_copy.default, value, why=why, dtype=dtype)
            why = "unchanged where the step is skipped"
            still = conditions[slot.index]
            kept = ir.call(gm.graph, aten.where.self, still, target, value, why=why)
        write.args = (target, kept)
    return changed


def _condition(gm: fx.GraphModule, config: StepConfig, index: int) -> fx.Node:
    """0-d bool: whether this step leaves a parameter and its state alone."""
    if not config.optional:
        return ir.step_notes(gm).skip
    absent = ir.scalar_slot(gm.graph, Slot("absent", index), torch.bool)
    if not config.checked:
        return absent
    why = "nor where it has no gradient"
    return ir.call(gm.graph, aten.logical_or.default, ir.step_notes(gm).skip, absent, why=why)
