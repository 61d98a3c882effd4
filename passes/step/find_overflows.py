"""Compute for each loss scale whether a gradient that depends on it overflowed. A rewriting pass.

    norm_0, norm_1      ->      overflow = logical_not(all(isfinite(stack([norm_0, norm_1]))))

A loss scale overflows if a gradient of a graph that uses it is not finite, or if such a graph has
set `flag`, because a gradient that another optimizer holds was not finite.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import StepConfig


def find_overflows(gm: fx.GraphModule, config: StepConfig) -> bool:
    if not config.checked:
        return False
    graph = gm.graph
    notes = ir.step_notes(gm)
    notes.overflows = []
    why = "a gradient that is not finite skips the step"
    with graph.inserting_before(notes.start):
        for k in range(len(config.scales)):
            flag = ir.scale_slot(graph, k, "flag", torch.int64)
            overflow = ir.call(graph, aten.gt.Scalar, flag, 0, why="overflows that the graphs saw")
            own = [n for n, g in zip(notes.norms, config.gradients, strict=True) if k in g.scales]
            if own:
                distinct = list(dict.fromkeys(own))
                stacked = ir.call(graph, aten.stack.default, distinct, why=why)
                finite = ir.call(graph, aten.isfinite.default, stacked, why=why)
                every = ir.call(graph, aten.all.default, finite, why=why)
                some = ir.call(graph, aten.logical_not.default, every, why=why)
                overflow = ir.call(graph, aten.logical_or.default, overflow, some, why=why)
            notes.overflows.append(overflow)
    return True
