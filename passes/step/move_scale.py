"""Move the loss scale on the device. A rewriting pass, the last one over a step.

    overflow                          scale x backoff_factor, not below min_scale, once `hysteresis`
                                      overflows have come; the counter of good steps starts anew
    growth_interval good steps        scale x growth_factor, not above max_scale
    any overflow                      skipped + 1

The same rule as `LossScale.update`, in tensors; it follows NVIDIA's guide to mixed precision. The
scale moves once for each training forward (`first`): of several optimizers over one model the first
one to step moves it, and after a good step of theirs the first one that overflows (`hit`: one did).
`floor` stays set once an overflow has come at the lowest scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import ScaleRule, StepConfig


def move_scale(gm: fx.GraphModule, config: StepConfig) -> bool:
    if not config.checked:
        return False
    overflows = ir.step_notes(gm).overflows
    for k, (overflow, rule) in enumerate(zip(overflows, config.scales, strict=True)):
        with gm.graph.inserting_before(gm.graph.output_node()):
            _Mover(gm.graph, k, overflow).run(rule)
    return True


class _Mover:
    def __init__(self, graph: fx.Graph, k: int, overflow: fx.Node) -> None:
        self.graph, self.k, self.overflow = graph, k, overflow

    def slot(self, key: str, dtype: torch.dtype) -> fx.Node:
        return ir.scale_slot(self.graph, self.k, key, dtype)

    def call(self, target: Any, *args: Any) -> fx.Node:
        return ir.call(self.graph, target, *args, why="the loss scale moves")

    def run(self, rule: ScaleRule) -> None:
        call, overflow = self.call, self.overflow
        skipped = self.slot("skipped", torch.int64)
        call(aten.copy_.default, skipped, call(aten.add.Tensor, skipped, overflow))
        if not rule.dynamic:
            return
        scale = self.slot("scale", torch.float32)
        good = self.slot("good_steps", torch.int64)
        left = self.slot("overflows_left", torch.int64)
        floor = self.slot("floor", torch.bool)
        first = self.slot("first", torch.bool)
        hit = self.slot("hit", torch.bool)
        hit_before = call(aten.logical_and.default, hit, call(aten.logical_not.default, first))
        fresh = call(aten.logical_and.default, overflow, call(aten.logical_not.default, hit_before))
        moves = call(aten.logical_or.default, first, fresh)
        call(aten.copy_.default, hit, call(aten.logical_or.default, overflow, hit_before))
        at_floor = call(aten.le.Scalar, scale, rule.min_scale)
        stuck = call(aten.logical_and.default, fresh, at_floor)
        call(aten.copy_.default, floor, call(aten.logical_or.default, floor, stuck))

        one_less = call(aten.sub.Scalar, left, 1)
        spent = call(aten.le.Scalar, one_less, 0)
        back = call(aten.logical_and.default, overflow, spent)
        one_more = call(aten.add.Scalar, good, 1)
        due = call(aten.ge.Scalar, one_more, rule.growth_interval)
        fine = call(aten.logical_not.default, overflow)
        grow = call(aten.logical_and.default, fine, due)
        moved = call(aten.logical_or.default, back, grow)

        lower = call(
            aten.clamp_min.default,
            call(aten.mul.Scalar, scale, rule.backoff_factor),
            rule.min_scale,
        )
        higher = call(
            aten.clamp_max.default, call(aten.mul.Scalar, scale, rule.growth_factor), rule.max_scale
        )
        new_scale = call(aten.where.self, back, lower, call(aten.where.self, grow, higher, scale))
        ends = call(aten.logical_or.default, overflow, grow)
        new_good = call(aten.masked_fill.Scalar, one_more, ends, 0)
        new_left = call(aten.where.self, overflow, one_less, left)
        new_left = call(aten.masked_fill.Scalar, new_left, moved, rule.hysteresis)
        for held, new in ((scale, new_scale), (good, new_good), (left, new_left)):
            call(aten.copy_.default, held, call(aten.where.self, moves, new, held))
