"""Graphs that padding has rewritten, and questions about them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from exact import CORES
from graphs import Stage
from torch import Tensor, fx, nn

from mpcompile import ir
from mpcompile.capture import pipeline
from mpcompile.ir.shapes import Alignment
from mpcompile.passes.graph.place_pads import place_pads
from mpcompile.rules import Kind

PAD, SLICE = "constant_pad_nd", "slice"


class Chain(nn.Module):
    """Two projections of odd sizes with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(257, 1001), nn.Linear(1001, 257)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


def placed(program: Any, *inputs: Any, until: pipeline.Pass = place_pads, **options: Any) -> Stage:
    """A graph that every pass up to `until` has rewritten; by default all dims are padded."""
    stage = Stage(until, program, *inputs, **{"pad": "always", "cores": CORES, **options})
    stage.run()
    return stage


def nodes(stage: Stage, *ops: str) -> list[fx.Node]:
    """The nodes of these operators, in program order."""
    names = [f"aten::{op}" for op in ops]
    return [n for n in stage.gm.graph.nodes if ir.is_op(n) and ir.op_name(n) in names]


def ours(stage: Stage, op: str) -> list[fx.Node]:
    """Those that padding put there."""
    return [n for n in nodes(stage, op) if ir.mark(n).rule == "pad"]


def pads_of_weights(stage: Stage) -> list[fx.Node]:
    """Every pad whose operand is a parameter, or made of one by casts and views."""

    def is_stored(node: fx.Node) -> bool:
        while ir.is_op(node) and (ir.is_cast(node) or ir.kind(node) is Kind.VIEW):
            node = node.all_input_nodes[0]
        return ir.is_parameter(node)

    return [n for n in ours(stage, PAD) if is_stored(n.all_input_nodes[0])]


def alignments(stage: Stage) -> dict[str, Alignment]:
    found = {node.name: ir.alignment(node) for node in stage.gm.graph.nodes}
    return {name: alignment for name, alignment in found.items() if alignment is not None}


def values_of(stage: Stage) -> dict[str, Tensor]:
    """Every tensor that the graph computes of random inputs, by name."""
    found = {}

    class Interpreter(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found[n.name] = result = super().run_node(n)
            return result

    inputs = [ir.value(n) for n in stage.gm.graph.find_nodes(op="placeholder")]
    Interpreter(stage.gm).run(*(torch.rand(x.shape, dtype=x.dtype) for x in inputs))
    return {name: value for name, value in found.items() if torch.is_tensor(value)}
