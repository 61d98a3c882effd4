"""Compute a norm of each gradient, which the check and the clipping share. A rewriting pass.

    grad0: bf16[4, 3] = input     ->      norm_0: f32[] = linalg_vector_norm(grad0, inf, dtype=f32)

The largest magnitude shows whether all elements are finite. If gradients are clipped, the 2-norm
shows it as well (a norm beyond FP32's range counts as an overflow). So each gradient is read only
once before the update. The norms of clipped gradients make the total norm:

    norm_0, norm_1                ->      total = sqrt(sum(square(norms)))

Alike gradients that lie one behind the other (`StepConfig.gathered`) have one norm, that of the
vector of them. Where several ranks hold a gradient whole, each takes its share of the square, so
that the sum over all ranks counts each element once. A rank may hold no element of a gradient
(FSDP's shards).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import Slot, StepConfig, StepNotes


def measure_gradients(gm: fx.GraphModule, config: StepConfig) -> bool:
    notes = ir.step_notes(gm)
    notes.norms = []
    if not config.checked and config.max_grad_norm is None:
        return False
    known = ir.slots(gm.graph)
    gradients = [known[Slot("grad", i)] for i in range(len(config.gradients))]
    # FP32 also for low-precision gradients; FP64 if some gradient is FP64, because of its range.
    wide = any(g.dtype is torch.float64 for g in config.gradients)
    with gm.graph.inserting_before(notes.start):
        notes.norms = _norms(gradients, config, torch.float64 if wide else torch.float32)
        if config.max_grad_norm is not None:
            notes.total = _total(notes, config)
    return True


def _norms(gradients: Sequence[fx.Node], config: StepConfig, dtype: torch.dtype) -> list[fx.Node]:
    """The norm of each gradient."""
    graph = gradients[0].graph
    order = float("inf") if config.max_grad_norm is None else 2.0
    why = "inf or nan exactly if an element is"

    def norm(gradient: fx.Node, order: float) -> fx.Node:
        target = aten.linalg_vector_norm.default
        return ir.call(graph, target, gradient, order, why=why, dtype=dtype)

    gathered = {
        gradients[i]: ir.vector_slot(graph, Slot("grads", k), [gradients[i] for i in group])
        for k, group in enumerate(config.gathered)
        for i in group
    }
    filled = list(dict.fromkeys(gathered.get(g, g) for g in gradients if ir.value(g).numel()))
    if config.foreach and filled:
        listed = ir.call(graph, aten._foreach_norm.Scalar, filled, order, dtype, why=why)
        norms = [ir.call(graph, operator.getitem, listed, i, why=why) for i in range(len(filled))]
    else:
        norms = [norm(g, order) for g in filled]
    known = dict(zip(filled, norms, strict=True))
    # Of no elements there is no largest one, but a 2-norm: 0.
    return [known[n] if (n := gathered.get(g, g)) in known else norm(g, 2.0) for g in gradients]


def _total(notes: StepNotes, config: StepConfig) -> fx.Node:
    """The 2-norm of this rank's share of all gradients."""
    graph = notes.start.graph
    why = "the norm of all gradients"
    shares: list[fx.Node] = []
    of_norm = dict(zip(notes.norms, config.gradients, strict=True))  # those of one norm are alike
    for norm, gradient in of_norm.items():
        if gradient.replicas != 1:
            norm = ir.call(graph, aten.mul.Tensor, norm, gradient.replicas**-0.5, why=why)
        shares.append(norm)
    stacked = ir.call(graph, aten.stack.default, shares, why=why)
    return ir.call(graph, aten.linalg_vector_norm.default, stacked, why=why)
