"""Compute on the device whether this step must be skipped. A rewriting pass.

    overflow_0, overflow_1      ->      skip = logical_or(overflow_0, overflow_1)
                                        copy_(result_skipped, skip)

An overflow of any loss scale skips the whole step.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import Slot, StepConfig


def check_gradients(gm: fx.GraphModule, config: StepConfig) -> bool:
    if not config.checked:
        return False
    graph = gm.graph
    notes = ir.step_notes(gm)
    skip, *others = notes.overflows
    result = ir.scalar_slot(graph, Slot("result", key="skipped"), torch.bool)
    with graph.inserting_before(notes.start):
        why = "an overflow of any scale skips the step"
        for overflow in others:
            skip = ir.call(graph, aten.logical_or.default, skip, overflow, why=why)
    with graph.inserting_before(graph.output_node()):
        ir.call(graph, aten.copy_.default, result, skip, why="what the step reports")
    notes.skip = skip
    return True
