"""Give the optimizer gradients in its parameters' dtype. A rewriting pass.

    grad0: bf16                  ->      to = to(grad0, f32)
    update(param0, grad0)                update(param0, to)

Gradients arrive unscaled: what makes them divides the loss scale out. Most are FP32; without a
scale, a gradient that only the optimizer reads is stored in its working copy's dtype.
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step_config import Slot, StepConfig


def widen_gradients(gm: fx.GraphModule, config: StepConfig) -> bool:
    graph = gm.graph
    changed, start = False, ir.first_call(graph)
    for i, gradient in enumerate(config.gradients):
        stored = ir.slots(graph)[Slot("grad", i)]
        wanted = ir.dtype(stored)
        if gradient.dtype is wanted:
            continue
        changed = True
        readers = list(stored.users)
        ir.set_dtype(stored, gradient.dtype)
        with graph.inserting_before(start):
            why = "it is stored in low precision"
            wide = ir.call(graph, aten._to_copy.default, stored, why=why, dtype=wanted)
        stored.replace_all_uses_with(wide, readers.__contains__)
    return changed
