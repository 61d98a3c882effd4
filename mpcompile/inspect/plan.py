"""The plan of one graph, as plain data: every node, its precision, and the reason."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .. import ir
from ..ir import hidden_products
from ..rules.policy import Config
from .tensor_cores import TensorCoreReport, tensor_core_report

_ADDED = {role.value for role in ir.ADDED}


@dataclass(frozen=True)
class PlanNode:
    """One line of the plan.

    Attributes:
        name: as in the dump; `Policy(nodes=...)` takes it.
        op: operator, `"aten::linear"`.
        module: dotted path of the module it comes from, or "".
        source: `"model.py:12"`, or "".
        captured, planned: result types in the FP32 program and as planned, `"f32[8, 4]"`.
        precision: "LOW", "FULL" or "KEEP".
        rule, reason: who decided, and why.
        costs: the costs that the planner weighed ("low", "full" -> term -> bytes of memory traffic;
            see planner/objective.py), or None where it had nothing to decide.
        products: number of matrix products inside an opaque call; they stay FP32.
    """

    name: str
    op: str
    module: str
    source: str
    captured: str
    planned: str
    precision: str
    rule: str
    reason: str
    costs: dict[str, dict[str, int]] | None = None
    products: int = 0

    @property
    def is_added(self) -> bool:
        """Whether a pass put the node there: a cast, a pad, or what scales a gradient."""
        return self.rule in _ADDED


@dataclass(frozen=True)
class Plan:
    """What the passes decided for one captured graph, or why it was left in FP32.

    Attributes:
        level, dtype, device: "O1", "float16", "cpu"; "O0", "float32" for a graph left in FP32.
        nodes: one for each node, in program order, casts and scaling included.
        casts: number of casts in the final graph.
        scaled: whether gradients are scaled inside the graph.
        seconds: wall time of capture and of each pass.
        changed: names of the passes that changed the graph, in their order.
        tensor_cores: the dims of every matrix product, and which may run on Tensor Cores.
        dump_dir: the directory of the dump, or None.
        left: why the graph was left in FP32, in one sentence; None for a graph that was rewritten.
            A graph that was left has no nodes.
    """

    level: str
    dtype: str
    device: str
    nodes: tuple[PlanNode, ...] = ()
    casts: int = 0
    scaled: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    tensor_cores: TensorCoreReport = TensorCoreReport()
    dump_dir: Path | None = None
    left: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `left` is omitted if it is None."""
        data = dataclasses.asdict(self)
        if self.left is None:
            del data["left"]
        data["tensor_cores"] |= {
            "share_before": self.tensor_cores.share_before,
            "share": self.tensor_cores.share,
        }
        data["dump_dir"] = str(self.dump_dir) if self.dump_dir else None
        return data

    def counts(self) -> dict[str, int]:
        """How many operators are LOW, FULL and KEEP, without casts and scaling."""
        return dict(Counter(n.precision for n in self.nodes if not n.is_added))

    def __str__(self) -> str:
        if self.left is not None:
            return f"{self.level} {self.dtype} on {self.device}: left in FP32: {self.left}"
        head = f"{self.level} {self.dtype} on {self.device}: {self.casts} casts, " + ", ".join(
            f"{count} {name}" for name, count in sorted(self.counts().items())
        )
        if hidden := sum(node.products for node in self.nodes):
            head += f"; matrix products in opaque calls, all FP32: {hidden}"
        width = max((len(f"{n.name}: {n.planned}") for n in self.nodes), default=0)
        lines = [
            f"{f'{n.name}: {n.planned}':<{width}}  {n.precision:<4}  {n.reason}"
            + (f"  ({n.module})" if n.module else "")
            for n in self.nodes
        ]
        return "\n".join([head, *lines, str(self.tensor_cores)])


def plan_of_left(reason: str, device: torch.device) -> Plan:
    """The plan of a graph that is compiled unchanged, in FP32."""
    return Plan(level="O0", dtype="float32", device=str(device), left=reason)


def plan_of(graph: fx.Graph, config: Config) -> Plan:
    """Read the decisions from a graph after its passes (before checkpoints are folded back)."""
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
            costs=ir.costs(node),
            products=hidden_products.products_in(node),
        )
        for node in graph.nodes
        if ir.is_marked(node)
    )
    return Plan(
        level=config.level.value,
        dtype=str(config.low).removeprefix("torch."),
        device=str(config.device),
        nodes=nodes,
        casts=sum(node.rule == ir.Role.CAST.value and node.op == "aten::to" for node in nodes),
        scaled=any(node.rule == ir.Role.SCALE.value for node in nodes),
        tensor_cores=tensor_core_report(graph),
    )
