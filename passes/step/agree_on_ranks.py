"""Make overflows and the norm those of all ranks, where gradients are sharded. A rewriting pass.

    overflow_0, total      ->      summed = all_reduce(stack([to(overflow_0, f64), total * total]))
                                   overflow_0' = summed[0] > 0
                                   total' = sqrt(summed[1])

It is one collective of a few numbers, whatever the model. All ranks get the same sums, so they skip
the same steps, clip by the same factor and move their scales alike. The squares are added in FP64:
its range holds the square of every FP32 norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import Ranks, StepConfig
from mpcompile.torch_inside.ops import OpOverload

_TO = aten._to_copy.default


def agree_on_ranks(gm: fx.GraphModule, config: StepConfig) -> bool:
    notes = ir.step_notes(gm)
    notes.agreement = []
    clipped = config.max_grad_norm is not None
    if config.ranks is None or not (config.checked or clipped):
        return False
    graph = gm.graph
    overflows = notes.overflows if config.checked else []
    why = "all ranks decide alike"
    with graph.inserting_before(notes.start):
        mine = [ir.call(graph, _TO, o, why=why, dtype=torch.float64) for o in overflows]
        if clipped:
            wide = ir.call(graph, _TO, notes.total, why=why, dtype=torch.float64)
            mine.append(ir.call(graph, aten.mul.Tensor, wide, wide, why=why))
        stacked = ir.call(graph, aten.stack.default, mine, why=why)
        notes.agreement = _all_reduce(stacked, config.ranks)
        sums = [
            ir.call(graph, aten.select.int, notes.agreement[-1], 0, i, why=why)
            for i in range(len(mine))
        ]
        if clipped:
            root = ir.call(graph, aten.sqrt.default, sums.pop(), why="the norm over all ranks")
            notes.total = ir.call(graph, _TO, root, why=why, dtype=ir.dtype(notes.total))
        if config.checked:
            notes.overflows = [ir.call(graph, aten.gt.Scalar, s, 0, why=why) for s in sums]
    return True


def _all_reduce(vector: fx.Node, ranks: Ranks) -> list[fx.Node]:
    """The nodes that add up a vector over all ranks; the last one is the sum."""
    graph = vector.graph
    home = ir.value(vector).device
    functional = torch.ops._c10d_functional  # there only if torch was built with distributed
    nodes = [vector]

    def then(target: OpOverload, *args: object, **kwargs: Any) -> None:
        why = "one sum over all ranks"
        nodes.append(ir.call(graph, target, nodes[-1], *args, why=why, **kwargs))

    if home.type != ranks.device:  # parameters that FSDP keeps on the host
        then(_TO, device=torch.device(ranks.device))
    for group in ranks.groups:
        then(functional.all_reduce.default, "sum", group)
        then(functional.wait_tensor.default)
    if home.type != ranks.device:
        then(_TO, device=home)
    return nodes[1:]
