"""One number for each gradient: the read that the check and the clipping share. A rewriting pass.

    grad0: f16[4, 3] = input      ->      norm_0: f32[] = linalg_vector_norm(grad0, inf, dtype=f32)

The largest magnitude tells whether all elements are finite. Where gradients are clipped the 2-norm
tells it too (one that leaves the range of FP32 counts as an overflow), so each gradient is read
once before the update.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import Slot, StepConfig


def measure_gradients(gm: fx.GraphModule, config: StepConfig) -> bool:
    notes = ir.step_notes(gm)
    notes.norms = []
    if not config.checked and config.max_grad_norm is None:
        return False
    graph = gm.graph
    known = ir.slots(graph)
    gradients = [known[Slot("grad", i)] for i in range(len(config.gradients))]
    order = float("inf") if config.max_grad_norm is None else 2.0
    why = "inf or nan exactly if an element is"
    # FP32, for low-precision gradients too; FP64 where a gradient is, for it has that range.
    wide = any(g.dtype is torch.float64 for g in config.gradients)
    dtype = torch.float64 if wide else torch.float32
    with graph.inserting_before(notes.start):
        if config.foreach:
            target = aten._foreach_norm.Scalar
            listed = ir.call(graph, target, gradients, order, dtype, why=why)
            notes.norms = [
                ir.call(graph, operator.getitem, listed, i, why=why) for i in range(len(gradients))
            ]
        else:
            target = aten.linalg_vector_norm.default
            notes.norms = [
                ir.call(graph, target, g, order, why=why, dtype=dtype) for g in gradients
            ]
    return True
