"""Hand gradients to the optimizer: in its parameters' dtype, and clipped. A rewriting pass.

    grad0: bf16                  ->      to = to(grad0, f32)
    update(param0, grad0)                update(param0, mul(to, factor))

Gradients arrive unscaled: what makes them divides the loss scale out (NVIDIA's guide to mixed
precision: clip after unscaling). Most are FP32; without a scale, a gradient that only the optimizer
reads is stored in its working copy's dtype.

A step that clips multiplies each by the factor that it has decided on: `mpcompile/optim/decide.py`
computes it from the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step_config import FACTOR, Slot, StepConfig


def take_gradients(gm: fx.GraphModule, config: StepConfig) -> bool:
    graph, to = gm.graph, aten._to_copy.default
    changed, start, slots = False, ir.first_call(graph), ir.slots(graph)
    factor = ir.scalar_slot(graph, FACTOR, torch.float32) if config.clipped else None
    for i, gradient in enumerate(config.gradients):
        stored = taken = slots[Slot("grad", i)]
        readers, wanted = list(stored.users), ir.dtype(stored)
        with graph.inserting_before(start):
            if gradient.dtype is not wanted:
                ir.set_dtype(stored, gradient.dtype)
                taken = ir.call(graph, to, taken, why="it is stored in low precision", dtype=wanted)
            if factor is not None:
                why = f"the global norm is clipped to {config.max_grad_norm:g}"
                taken = ir.call(graph, aten.mul.Tensor, taken, factor, why=why)
                if ir.dtype(taken) is not wanted:  # true of a 0-d gradient
                    taken = ir.call(graph, to, taken, why=why, dtype=wanted)
        stored.replace_all_uses_with(taken, readers.__contains__)
        changed |= taken is not stored
    return changed
