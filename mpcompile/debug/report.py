"""What `diagnose` found, as plain data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ..inspect.graph_plan import GraphPlan, PlanNode
from ..observe.fault import Fault
from ..observe.numbers import EXPONENTS, Numbers, Shares


@dataclass(frozen=True)
class NodeNumbers:
    """The numbers of one node of a rewritten graph.

    Attributes:
        graph: the number of its graph in the model's forward.
        node: its line in the plan.
        value, gradient: of its result, and of the gradient of that, loss scale included.
        error, gradient_error: by how much they are off, relative to the norm of the exact ones.
        error_fp32: the same of the value in FP32.
        shares, gradient_shares: what the low dtype makes of the exact ones; None where the value is
            stored in FP32.
        lost: the share of the gradient's elements that became zero.
    """

    graph: int
    node: PlanNode
    value: Numbers
    gradient: Numbers
    error: float | None
    error_fp32: float | None
    gradient_error: float | None
    shares: Shares | None
    gradient_shares: Shares | None
    lost: float


@dataclass(frozen=True)
class Update:
    """How one parameter moved in an optimizer step.

    Attributes:
        parameter: its name.
        ratio: the median of |update| / |weight| over the elements that moved.
        stalls: the share (0 to 1) of these whose update is less than half a unit in the last place
            of the low dtype (2**-11 of the weight in FP16, 2**-8 in BF16): without FP32 master
            weights they would not move.
    """

    parameter: str
    ratio: float
    stalls: float


@dataclass(frozen=True)
class Report:
    """What `diagnose` found.

    Attributes:
        model, level, dtype, device: as in a `Plan`.
        faults: what went wrong, most serious first; empty if nothing did.
        losses: "low", "fp32", "fp64" -> the loss of the last step.
        scale: the loss scale that the rewritten graph ran with; None where it scales nothing.
        suggested_scale: the largest power of two with max|g| * scale < 65504 over the gradients
            that are stored in FP16; None for BF16, or without gradients.
        nodes: the numbers of each node, in the order of the graphs.
        histogram: how many elements of the exact activation gradients have the binary exponent
            `EXPONENTS[i]`.
        updates: how the parameters moved.
        optimizer: what moved them: "AdamW".
        graphs: the plans of the graphs.
        notes: what the report could not find out, one sentence each.
    """

    model: str
    level: str
    dtype: str
    device: str
    faults: tuple[Fault, ...]
    losses: dict[str, float]
    scale: float | None
    suggested_scale: float | None
    nodes: tuple[NodeNumbers, ...]
    histogram: tuple[int, ...]
    updates: tuple[Update, ...]
    optimizer: str
    graphs: tuple[GraphPlan, ...]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Fault | None:
        """The most serious fault, or None."""
        return self.faults[0] if self.faults else None

    @property
    def pins(self) -> tuple[str, ...]:
        """The nodes to keep in FP32, for `Policy(nodes=...)`."""
        return tuple(dict.fromkeys(name for fault in self.faults for name in fault.pins))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; infinite and missing numbers are None."""
        faults = [{**dataclasses.asdict(f), "kind": f.kind.value} for f in self.faults]
        data = {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "faults": faults,
            "nodes": [
                {**dataclasses.asdict(n), "node": n.node.name, "module": n.node.module}
                for n in self.nodes
            ],
            "updates": [dataclasses.asdict(u) for u in self.updates],
            "graphs": [graph.to_dict() for graph in self.graphs],
            "exponents": [EXPONENTS.start, EXPONENTS.stop],
        }
        finite: dict[str, Any] = _finite(data)
        return finite

    def __str__(self) -> str:
        losses = ", ".join(f"{name} {loss:.6g}" for name, loss in self.losses.items())
        head = f"{self.model}, {self.level} {self.dtype} on {self.device}: loss {losses}"
        if self.scale is not None:
            head += f"; loss scale {self.scale:g}"
            if self.suggested_scale is not None:
                head += f", the largest that fits {self.suggested_scale:g}"
        found = [str(fault) for fault in self.faults] or ["no fault found"]
        worst = sorted(
            (n for n in self.nodes if n.error), key=lambda n: -(n.error or 0.0)
        )[:5]  # fmt: skip
        lines = [f"{n.error:.2%}  {n.node.name} ({n.node.module or '-'})" for n in worst]
        stalled = sorted(self.updates, key=lambda u: -u.stalls)[:3]
        moves = [f"{u.stalls:.1%}  {u.parameter}" for u in stalled if u.stalls]
        parts = [head, *found]
        if lines:
            parts += ["largest errors of values:", *(f"    {line}" for line in lines)]
        if moves:
            parts += [
                f"updates by {self.optimizer} too small to move a weight of the low dtype:",
                *(f"    {line}" for line in moves),
            ]
        return "\n".join([*parts, *self.notes])


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
