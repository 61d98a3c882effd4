"""The torch.compile backend that plans: each graph is rewritten and partitioned, not compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from .. import ir
from ..backend import planned_or_why, why_left
from ..capture.breaks import why_it_ends
from ..capture.surroundings import around_now
from ..ir.fakes import fake_of_fixed_size
from ..ir.inputs import FOUND, SCALE
from ..lower.emitter import emit
from ..lower.joint import NO_PASSES, JointPasses, joint_passes
from ..plan_graph import Facts, Planned
from ..planner.target import Target, device_of, place_of, target_of
from ..planner.times import ATTENTION
from ..plans.backward import Partitioned
from ..plans.graph_plan import GraphPlan, plan_of_left
from ..rules.policy import Level
from ..runtime.outside_products import counted
from ..scaling import copies, parameters
from ..scaling.skipped_steps import Repairs
from ..settings import Settings
from ..training import scale_for
from .stand_ins import StandIns

__all__ = ["Planner"]


@dataclass(eq=False, repr=False)  # torch.compile prints a backend, and hashes it
class Planner:
    """A torch.compile backend that plans each graph, partitions it, and runs it on stand-ins.

    Dynamo calls a backend without fake mode, so kernels are tried on real samples.

    Attributes:
        settings: the options.
        absent: the GPU to plan for, which isn't there; None: the device that a graph lies on.
        stand_ins: made the model and the inputs.
        mp_optimizer: whether an `MPOptimizer` holds the parameters; None: ask each of them.
        repairs: what `repair=True` has pinned while the model trained.
        graphs: the plan of each graph so far.
    """

    settings: Settings
    absent: Target | None
    stand_ins: StandIns
    mp_optimizer: bool | None
    repairs: Repairs
    graphs: list[GraphPlan] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if (reason := why_left(gm, example_inputs, self.settings)) is not None:
            return self._leave(gm, example_inputs, reason)
        ends_with = why_it_ends(gm)
        facts = self._facts(gm, example_inputs)
        planned = planned_or_why(gm, example_inputs, self.settings, lambda: facts)
        if isinstance(planned, str):
            return self._leave(gm, example_inputs, planned)
        if self.absent is not None:
            _attend_as_fused(planned.graph)
        inputs = planned.inputs
        working = self._working_copies(planned, example_inputs, facts.target.low)
        scaling = _scaling(example_inputs) if inputs.scaled else []
        fixed = [fake_of_fixed_size(copy) for copy in working]
        given = inputs.assembled(example_inputs, fixed, scaling)
        # Passes over the joint graph call kernels of the device, which an absent one can't have.
        there = self.absent is None
        joint = joint_passes(self.settings.level, facts.target.device) if there else NO_PASSES
        run = self._emit(planned.graph, given, replace(planned.plan, ends_with=ends_with), joint)
        flops = planned.plan.tensor_cores.flops
        return counted(lambda *args: run(*inputs.assembled(args, working, scaling)), flops)

    def _leave(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], reason: str
    ) -> Callable[..., Any]:
        device = place_of(example_inputs) if self.absent is None else self.absent.device
        left = replace(plan_of_left(reason, device), ends_with=why_it_ends(gm))
        return counted(self._emit(gm, example_inputs, left, untouched=True), 0)

    def _facts(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Facts:
        target = self.absent or target_of(device_of(example_inputs), self.settings.dtype)
        originals = [self.stand_ins.original(x) for x in example_inputs]
        return Facts(
            target,
            around_now(gm, example_inputs, target.device.type, self.settings.names()),
            scaled=scale_for(originals, target.low, self.settings) is not None,
            copied=self._copied(originals, target.low),
            pinned=self.repairs.pins,
        )

    def _copied(
        self, originals: Sequence[Any], low: torch.dtype
    ) -> Mapping[int, tuple[int, ...] | None]:
        """The inputs that the graph may read as low copies -> the shape that a copy has already."""
        if self.settings.level is not Level.O2:
            return {}
        held = {
            i: x
            for i, x in enumerate(originals)
            if isinstance(x, nn.Parameter) and x.dtype is torch.float32 and self._is_held(x)
        }
        if self.absent is not None:
            return dict.fromkeys(held)
        return {i: copies.stored_shape(x, low) for i, x in held.items()}

    def _is_held(self, parameter: nn.Parameter) -> bool:
        if self.mp_optimizer is None:
            return parameters.owner_of(parameter) is not None
        return self.mp_optimizer

    def _working_copies(
        self, planned: Planned, example_inputs: Sequence[Any], low: torch.dtype
    ) -> list[torch.Tensor]:
        """The low copies that an `MPOptimizer` would provide for the inputs that read them."""
        placeholders = planned.graph.graph.find_nodes(op="placeholder")
        working = []
        for k, of in planned.inputs.copies.items():
            master, shape = example_inputs[of], ir.value(placeholders[k]).shape
            stored = copies.memory_for(master, low, shape)
            working.append(stored.requires_grad_(master.requires_grad))
        return working

    def _emit(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        plan: GraphPlan,
        joint: JointPasses = NO_PASSES,
        *,
        untouched: bool = False,
    ) -> Callable[..., Any]:
        found = Partitioned(gm, {node.name for node in plan.nodes})
        run = emit(
            gm, inputs, "inductor", options={"joint_custom_pre_pass": found.joint}, joint=joint,
            recompute=self.settings.recompute, untouched=untouched, inner=found.inner,
        )  # fmt: skip
        self.graphs.append(replace(plan, saved=tuple(found.saved), backward=found.backward))
        return run


def _scaling(example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """What a `LossScale` gives a graph: the scale, and the leaf that counts overflows."""
    beside = next(x for x in example_inputs if isinstance(x, torch.Tensor))
    return [torch.zeros((), device=beside.device, requires_grad=x is FOUND) for x in (SCALE, FOUND)]


def _attend_as_fused(gm: fx.GraphModule) -> None:
    """Remove attention's dropout: on a GPU the fused kernel draws the mask again from a seed, but
    the CPU's attention with dropout would store scores and mask.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=ATTENTION):
                place = ir.position_of(node, "dropout_p")
                if place < len(node.args):
                    node.update_arg(place, 0.0)
                elif node.kwargs.get("dropout_p"):
                    node.update_kwarg("dropout_p", 0.0)
            module.recompile()
