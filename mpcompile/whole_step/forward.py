"""A forward of a training step: cut out of Dynamo's graph, and rewritten by the passes.

It is planned as the same forward would be in a graph of its own. What it reads besides Dynamo's
inputs, working copies and the loss scale, the whole step holds (`ExtraInputs`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..capture.pipeline import Planned
from ..compiler.graph_call import check_constants
from ..compiler.plan_graph import plan_graph
from ..compiler.repair import repair
from ..compiler.training import Training, training_of
from ..errors import CannotRewrite
from ..ir import aten
from ..ir.inputs import GraphInputs
from ..ir.spec import AsPlanned
from ..ir.targets import CHECKPOINT
from ..planner.graph_plan import O0_ASKED, GraphPlan, plan_of_left
from ..planner.target import place_of
from ..rules import RNN_OPS
from ..rules.policy import Level
from ..scaling import copies, guard
from ..scaling.loss_scale import LossScale
from ..scaling.parameters import is_leaf
from ..settings import Settings
from .parts import StepPart


@dataclass
class CopyInput:
    """A working copy that a forward reads.

    Attributes:
        at: the number of `copy.stored` among the held tensors.
        low: whether the gradient may stay in the low dtype: there is no loss scale.
    """

    master: torch.Tensor
    copy: copies.WorkingCopy
    at: int
    low: bool


@dataclass
class Forward:
    """A rewritten forward.

    Attributes:
        graph: takes what `layout` says, returns a tuple.
        layout: which input of the graph is what.
        reads: its working copies, in the order of `layout.copies`.
        scale: its loss scale, or None.
        scale_at, leaf_at: the numbers of the scale, and of the leaf whose "gradient" counts
            overflows, among the held tensors.
        plan: what was decided about it.
        recurrent: how many of its operators are recurrent layers.
    """

    graph: fx.GraphModule
    layout: GraphInputs
    plan: GraphPlan
    reads: list[CopyInput] = field(default_factory=list)
    scale: LossScale | None = None
    scale_at: int = -1
    leaf_at: int = -1
    recurrent: int = 0

    def run(self, given: Sequence[Any], held: Sequence[torch.Tensor]) -> TracedForward:
        """Run it under a tracer; `held`: the held tensors."""
        leaves = [
            held[read.at].detach().requires_grad_(read.master.requires_grad) for read in self.reads
        ]
        # A copy: a step further on in the same program may move the scale.
        used = held[self.scale_at].clone() if self.scale is not None else None
        counter = held[self.leaf_at] if self.scale is not None else None
        scaling = () if used is None else (used, counter)
        run_by = AsPlanned if self.plan.left is None else fx.Interpreter
        results = run_by(self.graph).run(*self.layout.assembled(given, leaves, scaling))
        if self.scale is not None:
            check_constants(results, self.graph.meta["mp_constant_results"])
        return TracedForward(self, leaves, used, counter, results)


@dataclass
class TracedForward:
    """A forward that has run under a tracer.

    Attributes:
        leaves: the working copies that it has read, one for each of `forward.reads`.
        used: the loss scale that it multiplied by: 0-d FP32, or None.
        counter: the leaf whose "gradient" counts overflows, or None.
    """

    forward: Forward
    leaves: list[torch.Tensor]
    used: torch.Tensor | None
    counter: torch.Tensor | None
    results: Sequence[Any]


def rewritten(
    part: StepPart,
    gm: fx.GraphModule,
    examples: Sequence[Any],
    settings: Settings,
    held: ExtraInputs,
) -> Forward:
    """Rewrite a forward.

    Args:
        gm: Dynamo's graph.
        examples: a value for each of the part's inputs: the caller's own tensors, and FakeTensors
            of what other parts make.
        held: takes the tensors that it reads besides.

    Raises:
        CannotRewrite: see `plan_graph`; or it holds what one graph can't.
    """
    with torch.set_grad_enabled(part.grad):
        graph = part.alone(gm)
        if settings.level is Level.O0:
            plan = plan_of_left(O0_ASKED, place_of(examples))
            return Forward(graph, GraphInputs(len(part.inputs)), plan)
        known = training_of(graph, examples, settings)
        planned = plan_graph(graph, examples, known.facts, settings)
    _check(planned.graph)
    copies.read_in_full([examples[i] for i in known.read_in_full(planned)])
    scale, device = known.scale_in(planned), known.facts.target.device
    reads = _reads(known, planned, held)
    forward = Forward(planned.graph, planned.inputs, planned.plan, reads, scale)
    forward.recurrent = sum(n.target in RNN_OPS for n in planned.graph.graph.nodes)
    if scale is not None:
        guard.watch([x for x in examples if is_leaf(x)], scale)
        if settings.repair:
            scale.in_a_row.repair = functools.partial(repair, scale)
        forward.scale_at = held.add(scale.live.reside(device)["scale"])
        forward.leaf_at = held.add(scale.overflows.leaf(device))
    return forward


def _check(captured: fx.GraphModule) -> None:
    if captured.graph.find_nodes(op="call_function", target=CHECKPOINT):
        raise CannotRewrite("an activation checkpoint: one graph would keep what it frees")
    recurrent = {n.target for n in captured.graph.nodes if n.target in RNN_OPS}
    if recurrent - {aten.lstm.input}:  # of these, `one_graph.py` asks what became of them
        raise CannotRewrite("a recurrent layer that would be unrolled over time")


def _reads(known: Training, planned: Planned, held: ExtraInputs) -> list[CopyInput]:
    reader = known.reader_for(planned)
    if not isinstance(reader, copies.Reader):  # no copies are kept of what trains
        return []
    pairs = list(known.copies_for(planned))
    lows = reader.stored_low([master for master, _ in pairs])
    return [
        CopyInput(master, copy, held.add(copy.stored), low)
        for (master, copy), low in zip(pairs, lows, strict=True)
    ]


class ExtraInputs:
    """Tensors that live between the steps: optimizer state, working copies, loss scales, settings.

    Attributes:
        tensors: in the order in which the step takes them.
        fresh: the numbers of those that are replaced in each step; all others stay where they are.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.fresh: set[int] = set()
        self._numbers: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that stays; each is held once."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]

    def add_fresh(self, tensor: torch.Tensor) -> int:
        """The number of a tensor like this one that each step replaces."""
        self.fresh.add(len(self.tensors))
        self.tensors.append(tensor)
        return len(self.tensors) - 1
