"""Make a step that must be skipped change nothing. A rewriting pass.

    copy_(param0, new)      ->      kept = where(skip, param0, new); copy_(param0, kept)

All writes of parameters and of the optimizer's state (moments and step counters) are selected this
way. `skip` is a value on the device, so the host doesn't wait for it. In the fused update this
costs no memory traffic: the old value is read in any case.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step_config import SKIPPED, StepConfig


def predicate_writes(gm: fx.GraphModule, config: StepConfig) -> bool:
    if not config.checked:
        return False
    graph = gm.graph
    writes = [w for w in ir.writes(graph) if ir.slot_of(w[1]).kind in ("param", "state")]
    skip = ir.scalar_slot(graph, SKIPPED, torch.bool)
    for write, target, value in writes:
        with graph.inserting_before(write):
            if ir.dtype(value) is not ir.dtype(target):
                dtype, why = ir.dtype(target), "as it is stored"
                value = ir.call(graph, aten._to_copy.default, value, why=why, dtype=dtype)
            why = "unchanged where the step is skipped"
            kept = ir.call(graph, aten.where.self, skip, target, value, why=why)
        write.args = (target, kept)
    return bool(writes)
