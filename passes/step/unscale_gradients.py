"""Give the optimizer unscaled gradients in its parameters' dtype. A rewriting pass.

    grad0: f16, times scale      ->      to = to(grad0, f32); mul = mul(to, inverse)
    update(param0, grad0)                update(param0, mul)

Below O2, gradients arrive unscaled in FP32 (the graphs unscale them) and stay as they are. At O2, a
gradient stored in the low dtype is cast up and, in FP16, divided by the scale that its graph used.
The scale is a power of two by default, so the product with its inverse is exact.
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
        unscaled = stored
        with graph.inserting_before(notes.start):
            if gradient.dtype is not wanted:
                ir.set_dtype(stored, gradient.dtype)
                why = "it is stored in low precision"
                unscaled = ir.call(graph, aten._to_copy.default, unscaled, why=why, dtype=wanted)
            if gradient.scaled_by is not None:
                k = gradient.scaled_by
                if k not in notes.inverses:
                    scale = ir.scale_slot(graph, k, "used")
                    why = "one over the scale of the gradients"
                    notes.inverses[k] = ir.call(graph, aten.reciprocal.default, scale, why=why)
                why = "the gradient, unscaled"
                unscaled = ir.call(graph, aten.mul.Tensor, unscaled, notes.inverses[k], why=why)
        if unscaled is not stored:
            changed = True
            for reader in readers:
                reader.replace_input_with(stored, unscaled)
        notes.gradients.append(unscaled)
    return changed
