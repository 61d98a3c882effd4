"""Hand the optimizer true gradients in its own dtype. A rewriting pass.

    grad0: f16, times scale      ->      to = to(grad0, f32); mul = mul(to, inverse)
    update(param0, grad0)                update(param0, mul)

A gradient below O2 arrives in FP32 and true to size (the graphs unscale it) and is left alone; one
that is stored in the low dtype is widened, and in FP16 divided by the scale its graph used. The
scale is a power of two by default, so the product with its inverse is exact.
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import Slot, StepConfig


def unscale_gradients(gm: fx.GraphModule, config: StepConfig) -> bool:
    graph = gm.graph
    notes = ir.step_notes(gm)
    notes.start = ir.first_call(graph)
    notes.inverses = {}
    notes.gradients = []
    changed = False
    for i, gradient in enumerate(config.gradients):
        stored = ir.slots(graph)[Slot("grad", i)]
        readers = list(stored.users)
        wanted = ir.dtype(stored)
        true = stored
        with graph.inserting_before(notes.start):
            if gradient.dtype is not wanted:
                ir.set_dtype(stored, gradient.dtype)
                true = ir.call(graph, aten._to_copy.default, true, why="stored low", dtype=wanted)
            if gradient.scaled_by is not None:
                k = gradient.scaled_by
                if k not in notes.inverses:
                    scale = ir.scale_slot(graph, k, "used")
                    why = "one over the scale of the gradients"
                    notes.inverses[k] = ir.call(graph, aten.reciprocal.default, scale, why=why)
                why = "the gradient true to size"
                true = ir.call(graph, aten.mul.Tensor, true, notes.inverses[k], why=why)
        if true is not stored:
            changed = True
            for reader in readers:
                reader.replace_input_with(stored, true)
        notes.gradients.append(true)
    return changed
