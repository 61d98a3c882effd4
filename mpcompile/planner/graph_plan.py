"""The plan of one graph: its data, and what shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .. import ir
from ..rules.policy import Config, Precision
from ..stored import restored
from .grid import Part, Shown, as_text
from .plan_data import GraphData, Line, PlanNode
from .plan_text import full_graph_parts, graph_parts, share_low
from .tensor_core_report import tensor_core_report
from .why import Answer, answer


class GraphPlan(Shown, GraphData):
    """What the passes decided for one captured graph, or why it was left in FP32: `GraphData` that
    prints itself and answers questions.
    """

    @classmethod
    def from_dict(cls, data: Any) -> GraphPlan:
        """The plan that `to_dict()` turned into `data`: a dump's `plan.json`, say.

        Raises:
            MPCompileError: it is not the data of a graph's plan, or something is missing.
        """
        return restored(cls, data)

    @property
    def share_low(self) -> float:
        """Of the FLOPs of its matmuls, convolutions and attention the share, 0 to 1, in half; 0 if
        it has none. Those in calls whose bodies are not rewritten don't count.
        """
        return share_low([self])

    def why(self, name: str) -> Answer:
        """Why a node is what it is, or what was decided for a module; as `Plan.why`."""
        return answer({None: self}, name)

    def full(self) -> Answer:
        """The graph node by node, with casts and what scales gradients: text to print.
        `print(plan)` says what matters of it.
        """
        return Answer(self if self.left is not None else as_text(full_graph_parts(self)))

    def _parts(self) -> Iterator[Part]:
        return graph_parts(self)


O0_ASKED = 'level="O0" was asked for'


def plan_of_left(reason: str, device: torch.device) -> GraphPlan:
    """The plan of a graph that is compiled unchanged, in FP32."""
    return GraphPlan(level="O0", dtype="float32", device=str(device), left=reason)


def lines_of(graph: fx.Graph) -> tuple[Line, ...]:
    """The graph as text, line by line."""
    return tuple(
        Line(node.name, ir.line(node), tuple(operand.name for operand in node.all_input_nodes))
        for node in graph.nodes
    )


def plan_of(graph: fx.Graph, config: Config, before: tuple[Line, ...] = ()) -> GraphPlan:
    """Read the decisions from a graph after its passes (before checkpoints are folded back).

    Args:
        graph: the rewritten graph.
        config: what it was rewritten with.
        before: the graph as captured (`lines_of`).
    """
    nodes = tuple(
        PlanNode(
            name=node.name,
            op=ir.op_name(node),
            module=ir.module_path(node),
            source=ir.source(node),
            captured=ir.type_text(node.meta.get("mp_captured")),
            planned=ir.type_text(node.meta.get("val")),
            precision=ir.mark(node).precision.value,
            rule=ir.mark(node).rule,
            reason=ir.mark(node).reason,
            products=ir.hidden_products(node),
            frames=ir.frames(node),
            reads=tuple(operand.name for operand in node.all_input_nodes),
            low=_low_of_its_own(ir.mark(node), config),
        )
        for node in graph.nodes
        if ir.is_marked(node) and node.op != "placeholder"
    )
    found = map(ir.min_cut, graph.nodes)
    cuts = {id(cut): cut for cut in found if cut}  # a later one has fewer items
    return GraphPlan(
        level=config.level.value,
        dtype=_named(config.low),
        device=str(config.device),
        nodes=nodes,
        casts=sum(node.rule == ir.Role.CAST.value and node.op == "aten::to" for node in nodes),
        scaled=any(node.rule == ir.Role.SCALE.value for node in nodes),
        tensor_cores=tensor_core_report(graph),
        before=before,
        after=lines_of(graph),
        cuts=tuple(sorted(cuts.values(), key=lambda cut: len(cut.items))),
    )


def _low_of_its_own(decision: ir.Mark, config: Config) -> str:
    own = decision.precision is Precision.LOW and decision.low is not config.low
    return _named(decision.low) if own else ""


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
