"""What `diagnose` found, as plain data that can't show itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .._version import __version__
from ..observe.fault import Fault
from ..observe.numbers import EXPONENTS, Numbers, Shares
from ..plans.graph_plan import GraphPlan, PlanNode


@dataclass(frozen=True)
class NodeNumbers:
    """The numbers of one node of a rewritten graph.

    Attributes:
        graph: the number of its graph in the model's forward.
        node: its line in the plan.
        value, gradient: of its result, and of the gradient of that, loss scale included.
        error, gradient_error: by how much their finite elements are off, relative to the norm of
            the exact ones; None where none is finite, or it isn't known.
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
class ReportData:
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
            `EXPONENTS[i]`, that is floor(log2 |x|); those beyond either end are counted there.
        zeros: how many more of their elements are zero.
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
    zeros: int
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

    @property
    def value_shares(self) -> Shares:
        """What the low dtype makes of all values that are stored in it."""
        return _together(n.shares for n in self.nodes)

    @property
    def gradient_shares(self) -> Shares:
        """What the low dtype makes of all gradients that are stored in it, times the loss scale."""
        return _together(n.gradient_shares for n in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the attributes, where numbers that are infinite or NaN are None.

        Beside them: "pins"; "value_shares" and "gradient_shares", over all nodes; "exponents", the
        first of the histogram and the one behind its last; "versions". Of a node there is its name
        and module: "graphs" has the rest.
        """
        data = {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "faults": [{**dataclasses.asdict(f), "kind": f.kind.value} for f in self.faults],
            "pins": self.pins,
            "nodes": [
                {**dataclasses.asdict(n), "node": n.node.name, "module": n.node.module}
                for n in self.nodes
            ],
            "value_shares": dataclasses.asdict(self.value_shares),
            "gradient_shares": dataclasses.asdict(self.gradient_shares),
            "updates": [dataclasses.asdict(u) for u in self.updates],
            "graphs": [graph.to_dict() for graph in self.graphs],
            "exponents": [EXPONENTS.start, EXPONENTS.stop],
            "versions": {"mpcompile": __version__, "torch": torch.__version__},
        }
        finite: dict[str, Any] = _finite(data)
        return finite


def _together(shares: Iterable[Shares | None]) -> Shares:
    """The shares of several nodes as one, by their numbers of elements."""
    found = [one for one in shares if one is not None]
    total = sum(one.count for one in found)
    if not total:
        return Shares()
    return Shares(
        sum(one.flushed * one.count for one in found) / total,
        sum(one.subnormal * one.count for one in found) / total,
        sum(one.overflowed * one.count for one in found) / total,
        count=total,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
