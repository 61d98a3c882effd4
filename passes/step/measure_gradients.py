"""Compute a norm of each gradient, which the check and the clipping share. A rewriting pass.

    grad0: f16[4, 3] = input      ->      norm_0: f32[] = linalg_vector_norm(grad0, inf, dtype=f32)

The largest magnitude shows whether all elements are finite. If gradients are clipped, the 2-norm
shows it as well (a norm beyond FP32's range counts as an overflow). So each gradient is read only
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
    # FP32 also for low-precision gradients; FP64 if some gradient is FP64, because of its range.
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
