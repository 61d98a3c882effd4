"""A fault: what went wrong, at which node, and which nodes to keep in FP32; and what one is read
from: the records of one graph's runs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isinf

import torch
from torch import fx

from .. import ir
from ..ir.dtypes import HALF
from ..planner.graph_plan import GraphPlan
from ..planner.plan_data import PlanNode
from .record import BackwardStep, Numbers, Record

_UNKNOWN = Numbers(amax=float("inf"))


class FaultKind(enum.Enum):
    """What is wrong. The values are words for people."""

    OVERFLOW = "overflow"
    BACKWARD = "overflow in the backward"
    OWN = "not finite, in FP32 either"
    UNDERFLOW = "underflow in the backward"
    INACCURATE = "inaccurate"


@dataclass(frozen=True)
class Fault:
    """One thing that went wrong.

    Attributes:
        kind: what.
        node: the operator whose line to look at, with its module, source line and frames.
        reason: what happened there, in one sentence.
        amax: the largest magnitude of the exact value or gradient; infinity if it isn't known.
        pins: the nodes to keep in FP32, for `Policy(nodes=...)`; empty where that doesn't help.
        graph: the number of the graph in the model's forward.
    """

    kind: FaultKind
    node: PlanNode
    reason: str
    amax: float = float("inf")
    pins: tuple[str, ...] = ()
    graph: int = 0

    def __str__(self) -> str:
        where = self.node.module or "the model itself"
        if self.node.source:
            where += f" ({self.node.source})"
        lines = [f"{self.kind.value}: {where}: {self.node.name} = {self.node.op}", self.reason]
        if len(self.node.frames) > 1:
            lines.append("called from " + " < ".join(reversed(self.node.frames[:-1])))
        if self.pins:
            pins = ", ".join(f"{name!r}: 'fp32'" for name in self.pins)
            lines.append(f"to keep it in FP32: policy=Policy(nodes={{{pins}}})")
        return "\n    ".join(lines)


# Values above this share of the dtype's range are taken for values that may leave it.
NEAR = 0.5


@dataclass
class GraphRuns:
    """The runs of one graph, as the rules ask about them that look for faults.

    Attributes:
        graph: the rewritten graph, before checkpoints are folded back.
        plan: its plan.
        low: what was recorded of it.
        full: of the captured graph in FP32, or None; its backward may be missing.
        exact: of the captured graph in FP64, or None.
        scale: the loss scale that the rewritten graph ran with.
        loss: the loss of that run; None if it isn't known.
        nodes, lines: the nodes of the graph, and their lines in the plan, by name.
        steps: the steps of the backward of each node.
    """

    graph: fx.Graph
    plan: GraphPlan
    low: Record
    full: Record | None = None
    exact: Record | None = None
    scale: float = 1.0
    loss: float | None = None

    def __post_init__(self) -> None:
        self.nodes = {n.name: n for n in self.graph.nodes}
        self.lines: Mapping[str, PlanNode] = {line.name: line for line in self.plan.nodes}
        self.steps: dict[str, list[BackwardStep]] = {}
        for step in self.low.steps:
            self.steps.setdefault(step.node, []).append(step)

    def amax(self, name: str) -> float:
        """The largest magnitude of a value in FP64, else in FP32; infinity if neither is known."""
        return self.known("values", name).amax

    def gradient_amax(self, name: str) -> float:
        """The same of the gradient of a value, without the loss scale."""
        return self.known("gradients", name).amax

    def known(self, what: str, name: str) -> Numbers:
        """The numbers of one of the "values" or "gradients" there; see `whole`."""
        name = whole(self.nodes[name]).name
        found = [getattr(r, what) for r in (self.exact, self.full) if r is not None]
        return next((of[name] for of in found if name in of), _UNKNOWN)

    def value(self, n: fx.Node) -> Numbers:
        """The numbers of a value in the rewritten graph; see `whole`."""
        return self.low.values.get(whole(n).name, Numbers())

    def too_large(self, n: fx.Node, margin: float = 1 / NEAR) -> Iterator[tuple[str, float]]:
        """What of an operator would not fit the low dtype that it is in, were it `margin` times as
        large: which number, and its magnitude.
        """
        for place in (n,) if ir.is_getitem(n) else (n, *n.all_input_nodes):
            if dtype_of(place) in HALF:
                source = ir.unadded(place).name
                what = "result" if place is n else f"operand {source}"
                amax = self.amax(source)
                if torch.finfo(dtype_of(place)).max / margin < amax < float("inf"):
                    yield what, amax

    def gradients_arrive_bad(self) -> bool:
        """Whether a gradient that is not finite leaves the graph, to a parameter or another input.
        One that meets a zero on its way does no harm, as that of a relu.
        """
        return any(
            step.passed_on.bad
            for name, steps in self.steps.items()
            if any(ir.unadded(x).op == "placeholder" for x in self.nodes[name].all_input_nodes)
            for step in steps
        )

    def excess(self, n: fx.Node) -> int | None:
        """How many more elements of a value are not finite than in FP32; None if FP32's are not
        known.
        """
        source = whole(ir.unadded(n)).name
        wanted = self.full.values.get(source) if self.full is not None else None
        return None if wanted is None else self.value(n).bad - wanted.bad

    def is_program(self, n: fx.Node) -> bool:
        """Whether the node is an operator of the program: none that a pass added, no input."""
        return n.name in self.lines and not self.lines[n.name].is_added

    def readers(self, n: fx.Node) -> list[fx.Node]:
        """The operators of the program that read this value or a part of it, through casts and
        scaling of ours.
        """
        found = []
        for user in n.users:
            if ir.role(user) in ir.ADDED or ir.is_getitem(user):
                found += self.readers(user)
            elif self.is_program(user):
                found.append(user)
        return found

    def who_passed(self, value: fx.Node) -> fx.Node | None:
        """The operator whose backward made the largest gradient of a value, or of a cast of one."""
        sizes = {
            reader: max((s.passed_on.amax for s in self.steps.get(reader.name, ())), default=0.0)
            for reader in self.readers(value)
        }
        return max(sizes, key=lambda reader: sizes[reader], default=None)

    def fault(
        self,
        kind: FaultKind,
        n: fx.Node,
        reason: str,
        amax: float = float("inf"),
        pins: Iterable[str] = (),
    ) -> Fault:
        """A fault at a node. Of the pins, those count that are operators of the program."""
        line = self.lines.get(n.name) or PlanNode(
            n.name, ir.op_name(n), ir.module_path(n), ir.source(n), "", "", "", "", "",
            frames=ir.frames(n),
        )  # fmt: skip
        own = [name for name in pins if name in self.nodes and self.is_program(self.nodes[name])]
        return Fault(kind, line, reason, amax, tuple(dict.fromkeys(own)))


def whole(n: fx.Node) -> fx.Node:
    """The operator whose result this is, or is a part of: the numbers are those of all parts."""
    while ir.is_getitem(n):
        n = n.all_input_nodes[0]
    return n


def dtype_of(n: fx.Node) -> torch.dtype:
    """The dtype of the node's first floating-point result; FP32 if it has none."""
    found = [t.dtype for t in ir.tensors_of(n.meta.get("val")) if t.is_floating_point()]
    return found[0] if found else torch.float32


def low_name(n: fx.Node) -> str:
    """The low dtype in which a value is stored or read: `"float16"`."""
    low = dtype_of(n)
    if low not in HALF:  # stored in FP32, but rounded on its way to a reader
        low = next((dtype_of(user) for user in n.users if dtype_of(user) in HALF), low)
    return str(low).removeprefix("torch.")


def text(number: float) -> str:
    """A magnitude, for people."""
    return "an unknown size" if isinf(number) else f"{number:.3g}"
