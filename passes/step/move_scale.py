"""Move the loss scale on the device. A rewriting pass, the last one over a step.

    skip      ->      add = add(scale0_skipped_steps, overflow)
                      copy_(scale0_skipped_steps, add)
                      ...

The rule is `settled` in `mpcompile/ir/scale.py`, which `LossScale` follows on the host; here it is
traced with the inputs of the graph that hold the scale's state. If several optimizers share a
model, the first one to step moves the scale (`first`); if its step is good, so does the first one
that overflows later (`hit`: one did).
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.scale import STATE_DTYPES, ScaleRule, ScaleState, settled
from mpcompile.ir.step import StepConfig

_WHY = "the loss scale moves"


def move_scale(gm: fx.GraphModule, config: StepConfig) -> bool:
    if not config.checked:
        return False
    overflows = ir.step_notes(gm).overflows
    for k, (overflow, rule) in enumerate(zip(overflows, config.scales, strict=True)):
        with gm.graph.inserting_before(gm.graph.output_node()):
            _move(gm.graph, k, rule, overflow)
    return True


def _move(graph: fx.Graph, k: int, rule: ScaleRule, overflow: fx.Node) -> None:
    def after(
        overflow: torch.Tensor, first: torch.Tensor, *fields: torch.Tensor
    ) -> list[torch.Tensor]:
        state = ScaleState(*fields)  # type: ignore[arg-type]  # tensors for numbers
        new = settled(rule, state, overflow, first)
        return [getattr(new, name) for name in STATE_DTYPES]

    first = ir.scale_slot(graph, k, "first", torch.bool)
    before = [ir.scale_slot(graph, k, name, dtype) for name, dtype in STATE_DTYPES.items()]
    moved = ir.inline(graph, after, [overflow, first, *before], why=_WHY)
    for held, new in zip(before, moved, strict=True):
        if new is not held:
            ir.call(graph, aten.copy_.default, held, new, why=_WHY)
    for unused in (node for node in (first, *before) if not node.users):  # a static scale's
        graph.erase_node(unused)
