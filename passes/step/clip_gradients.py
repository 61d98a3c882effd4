"""Clip the gradients: multiply each by the factor that this step has decided on. A rewriting pass.

    update(param0, grad0)      ->      update(param0, mul(grad0, factor))

`mpcompile/optim/decide.py` computes the factor from the norm of all gradients, as
`torch.nn.utils.clip_grad_norm_` does. Gradients arrive unscaled (NVIDIA's guide to mixed precision:
clip after unscaling).
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step_config import FACTOR, StepConfig


def clip_gradients(gm: fx.GraphModule, config: StepConfig) -> bool:
    if not config.clipped:
        return False
    graph = gm.graph
    factor = ir.scalar_slot(graph, FACTOR, torch.float32)
    why = f"the global norm is clipped to {config.max_grad_norm:g}"
    start = ir.first_call(graph)
    for gradient in [n for slot, n in ir.slots(graph).items() if slot.kind == "grad"]:
        readers = list(gradient.users)
        with graph.inserting_before(start):
            clipped = ir.call(graph, aten.mul.Tensor, gradient, factor, why=why)
            if (dtype := ir.dtype(gradient)) is not ir.dtype(clipped):  # true of a 0-d gradient
                clipped = ir.call(graph, aten._to_copy.default, clipped, why=why, dtype=dtype)
        gradient.replace_all_uses_with(clipped, readers.__contains__)
    return True
