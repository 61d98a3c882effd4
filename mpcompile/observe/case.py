"""One run of one graph, as the rules ask about it that look for faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from math import isinf

import torch
from torch import fx

from .. import ir
from ..ir.dtypes import HALF
from ..plans.graph_plan import GraphPlan, PlanNode
from .compared import source_of_value
from .fault import Fault, Kind, Runs
from .numbers import Numbers
from .record import BackwardStep

# Values above this share of the dtype's range are taken for values that may leave it.
NEAR = 0.5


class Case:
    """A graph, its plan, and what was recorded of it.

    Attributes:
        nodes, lines: the nodes of the graph, and their lines in the plan, by name.
        steps: the steps of the backward of each node.
    """

    def __init__(self, graph: fx.Graph, plan: GraphPlan, runs: Runs) -> None:
        self.graph, self.runs = graph, runs
        self.nodes = {n.name: n for n in graph.nodes}
        self.lines: Mapping[str, PlanNode] = {line.name: line for line in plan.nodes}
        self.steps: dict[str, list[BackwardStep]] = {}
        for step in runs.low.steps:
            self.steps.setdefault(step.node, []).append(step)

    def value(self, n: fx.Node) -> Numbers:
        """The numbers of a value in the rewritten graph."""
        while ir.is_getitem(n):
            n = n.all_input_nodes[0]
        return self.runs.low.values.get(n.name, Numbers())

    def gradients_arrive_bad(self) -> bool:
        """Whether a gradient that is not finite leaves the graph, to a parameter or another input.
        One that meets a zero on its way does no harm, as behind a relu.
        """
        return any(
            step.passed_on.bad
            for name, steps in self.steps.items()
            if any(source_of_value(x).op == "placeholder" for x in self._reads(name))
            for step in steps
        )

    def _reads(self, name: str) -> list[fx.Node]:
        return [x for x in self.nodes[name].all_input_nodes if x.op != "get_attr"]

    def excess(self, n: fx.Node) -> int | None:
        """How many more elements of a value are not finite than in FP32; None if FP32's are not
        known.
        """
        while ir.is_getitem(n):
            n = n.all_input_nodes[0]
        wanted = self.runs.bad_in_full(source_of_value(n).name)
        return None if wanted is None else self.value(n).bad - wanted

    def is_program(self, n: fx.Node) -> bool:
        """Whether the node is an operator of the program: none that a pass added, no input."""
        return n.name in self.lines and not self.lines[n.name].is_added

    def who_passed(self, value: fx.Node) -> fx.Node | None:
        """The operator whose backward made the largest gradient of a value, or of a cast of one."""
        sizes = {
            reader: max((s.passed_on.amax for s in self.steps.get(reader.name, ())), default=0.0)
            for reader in readers(value)
            if self.is_program(reader)
        }
        return max(sizes, key=lambda reader: sizes[reader], default=None)

    def fault(
        self,
        kind: Kind,
        n: fx.Node,
        reason: str,
        amax: float = float("inf"),
        pins: Iterable[str] = (),
        step: BackwardStep | None = None,
    ) -> Fault:
        """A fault at a node; inside of a user's backward, if the step says at which line. Of the
        pins, those count that are operators of the program.
        """
        frames = step.frames if step is not None and step.frames else None
        line = self.lines.get(n.name)
        line = line or PlanNode(
            n.name, ir.op_name(n), ir.module_path(n), ir.source(n), "", "", "", "", "",
            frames=ir.frames(n),
        )  # fmt: skip
        if frames:
            source = frames[-1].partition(" in ")[0]
            line = dataclasses.replace(line, source=source, frames=frames)
        own = [name for name in pins if name in self.nodes and self.is_program(self.nodes[name])]
        return Fault(kind, line, reason, amax, tuple(dict.fromkeys(own)))


def readers(n: fx.Node) -> Iterator[fx.Node]:
    """The operators of the program that read this value, through casts and scaling of ours."""
    for user in n.users:
        if ir.role(user) in ir.ADDED:
            yield from readers(user)
        elif user.op != "output":
            yield user


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
