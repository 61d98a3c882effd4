"""Clip the global norm of the gradients. A rewriting pass.

    update(param0, grad0)      ->      factor = clamp(max_norm / (total + 1e-6), max=1)
                                       update(param0, mul(grad0, factor))

It clips as `torch.nn.utils.clip_grad_norm_` does, and uses the total norm of measure_gradients.
Gradients arrive unscaled (NVIDIA's guide to mixed precision: clip after unscaling). The step
reports the norm before clipping.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import Slot, StepConfig


def clip_gradients(gm: fx.GraphModule, config: StepConfig) -> bool:
    if config.max_grad_norm is None:
        return False
    graph = gm.graph
    notes = ir.step_notes(gm)
    result = ir.scalar_slot(graph, Slot("result", key="norm"), torch.float32)
    why = f"the global norm is clipped to {config.max_grad_norm:g}"
    total = notes.total
    with graph.inserting_before(notes.start):
        padded = ir.call(graph, aten.add.Tensor, total, 1e-6, why=why)
        inverse = ir.call(graph, aten.reciprocal.default, padded, why=why)
        factor = ir.call(graph, aten.mul.Tensor, inverse, config.max_grad_norm, why=why)
        factor = ir.call(graph, aten.clamp_max.default, factor, 1.0, why=why)
        for gradient in notes.gradients:
            readers = [
                u for u in gradient.users if u not in notes.norms and u.target is not _FOREACH
            ]
            clipped = ir.call(graph, aten.mul.Tensor, gradient, factor, why=why)
            if (dtype := ir.dtype(gradient)) is not ir.dtype(clipped):  # true of a 0-d gradient
                clipped = ir.call(graph, aten._to_copy.default, clipped, why=why, dtype=dtype)
            for reader in readers:
                reader.replace_input_with(gradient, clipped)
    with graph.inserting_before(graph.output_node()):
        ir.call(graph, aten.copy_.default, result, total, why="what the step reports")
    return True


_FOREACH = aten._foreach_norm.Scalar
