"""An optimizer's step inside of a whole training step.

The step is traced and rewritten as that of an `MPOptimizer` (`optim/`): checked, unscaled, clipped,
predicated; then its gradients come from the backward in the same graph, and are never stored. A
plain optimizer's step is treated alike, so it doesn't wait for the device either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from .. import ir
from ..devices.registry import capabilities
from ..errors import CannotRewrite
from ..ir.dtypes import HALF
from ..ir.step import Gradient, Slot, StepConfig
from ..optim import pipeline, program
from ..optim.compile_piece import Emit
from ..optim.fingerprint import Fact, Fingerprint
from ..optim.first_state import gradients_stand_by, initialise_state
from ..optim.held_settings import HeldSettings
from ..optim.inputs import Member, Setting
from ..optim.join_pieces import join_small, keep_results
from ..optim.parts import StepParts, parts_of
from ..optim.pieces import UPDATE, Split, split, stages_of
from ..optim.rests_on import OfStep
from ..optim.trace import Trace, trace
from ..ranks.shards import is_sharded
from ..state import copies, guard, hooks, optimizers, parameters
from ..state.loss_scale import LossScale
from ..torch_inside.amp import autocast_off
from ..torch_inside.optimizers import note_step
from .gradients import Arrived
from .held import Held
from .tracing import parameters_of


class Update:
    """One optimizer's step, for parameters that have a gradient.

    Args:
        optimizer: whose step it is.
        params: the parameters.
        arrived: their gradients.
        varying: settings whose floats are inputs, because they were seen to change.
        held: takes the tensors that the step reads and writes.
        behind: how its pieces run behind the graph, if it isn't a part of the graph.

    Attributes:
        optimizer: as given.
        scales: the loss scales of the gradients.
        is_behind: whether it runs behind the graph.
        rounds: whether it computes in a low dtype by itself, as Muon does.

    Raises:
        StateAppeared, CannotRewrite: see `optim.trace`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[torch.Tensor],
        arrived: Sequence[Arrived],
        varying: frozenset[Setting],
        held: Held,
        behind: Emit | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.is_behind = behind is not None
        self._parts = parts = parts_of(optimizer)
        if parts.is_connected or any(map(is_sharded, params)):
            raise CannotRewrite("several processes hold the parameters")
        if any(a.grad.layout is not torch.strided for a in arrived):
            raise CannotRewrite("a gradient is sparse")
        self._all = parameters_of(optimizer)
        self._members = _members(optimizer, params)
        self._copies = [next(iter(copies.copies_of(p).values()), None) for p in params]
        self._learn_scales(parts)
        self._check_given_scale()
        self._device = params[0].device
        config = self._config(arrived, varying)
        with gradients_stand_by(self._all, params):
            initialise_state(parts.optimizer, self._members)
            traced = self._traced(arrived, config, varying)
        groups = {member.group for member in self._members}
        self._settings = HeldSettings(
            parts.optimizer.param_groups, groups, traced, varying, self._device
        )
        self._step_rests_on = OfStep(parts.optimizer, self._members, traced, self._settings)
        # (The numbers of parameters are enough: they live as long as this step.)
        self._rests_on = Fingerprint(
            Fact("other parameters", lambda o: [*map(id, parameters_of(o))], parts.optimizer),
            self._step_rests_on,
            Fact("hooks of its step", lambda _: hooks.has_others(optimizer), parts.optimizer),
        )
        self._graph = traced.graph
        self._hold(held, behind)

    def _learn_scales(self, parts: StepParts) -> None:
        """The loss scales, and for each parameter the numbers of its own."""
        self.scales: list[LossScale] = []
        self._scales_of: list[tuple[int, ...]] = []
        for member in self._members:
            known = parameters.scales_of(member.param) or ((parts.own,) if parts.own else ())
            for scale in known:
                if not any(scale is s for s in self.scales):
                    self.scales.append(scale)
            own = tuple(i for i, s in enumerate(self.scales) if any(s is k for k in known))
            self._scales_of.append(own)

    def _check_given_scale(self) -> None:
        given = getattr(self.optimizer, "_given_scale", None)
        if given is not None and any(scale is not given for scale in self.scales):
            raise CannotRewrite("its MPOptimizer was given another loss scale")

    def _config(self, arrived: Sequence[Arrived], varying: frozenset[Setting]) -> StepConfig:
        def number(scale: LossScale | None) -> int | None:
            return next((i for i, s in enumerate(self.scales) if s is scale), None)

        gradients = tuple(
            Gradient(a.grad.dtype, own, number(a.scale))
            for a, own in zip(arrived, self._scales_of, strict=True)
        )
        return StepConfig(
            gradients=gradients,
            copies=tuple(c.layout if c is not None else None for c in self._copies),
            checked=any(scale.active for scale in self.scales),
            scales=tuple(scale.rule for scale in self.scales),
            max_grad_norm=self._parts.max_grad_norm,
            foreach=capabilities(self._device).multi_tensor and not varying,
        )

    def _traced(
        self, arrived: Sequence[Arrived], config: StepConfig, varying: frozenset[Setting]
    ) -> Trace:
        optimizer, strides = self._parts.optimizer, [a.grad.stride() for a in arrived]
        traced = trace(
            optimizer, self._members, foreach=config.foreach, varying=varying, strides=strides
        )
        nodes = traced.graph.graph.nodes
        self.rounds = any(t.dtype in HALF for n in nodes if (t := ir.tensor(n)) is not None)
        pipeline.run(traced.graph, config, traced_in=0.0, dump=self._parts.dump)
        return traced

    def _known(self) -> dict[Slot, torch.Tensor]:
        """The tensors that are the same in every step, by the slot of their input."""
        state = self._parts.optimizer.state
        known: dict[Slot, torch.Tensor] = {
            **self._settings.tensors,
            **self._parts.results.slots(self._device),
        }
        for i, (member, copy) in enumerate(zip(self._members, self._copies, strict=True)):
            known[Slot("param", i)] = member.param
            if copy is not None:
                known[Slot("copy", i)] = copy.tensor
            for key, value in state.get(member.param, {}).items():
                if isinstance(value, torch.Tensor):
                    known[Slot("state", i, str(key))] = value
        for k, scale in enumerate(self.scales):
            for field, tensor in scale.reside(self._device).items():
                known[Slot("scale", k, field)] = tensor
        return known

    def _hold(self, held: Held, behind: Emit | None) -> None:
        """Hold what the step reads and writes besides parameters and gradients."""
        known = self._known()
        self._inputs = [ir.slot_of(n) for n in self._graph.graph.find_nodes(op="placeholder")]
        self._no_overflows = torch.zeros((), dtype=torch.int64, device=self._device)
        self._firsts = [torch.tensor(is_first, device=self._device) for is_first in (False, True)]
        self._at: dict[Slot, int] = {}
        for slot in self._inputs:
            if slot.kind == "scale" and slot.key == "flag":
                self._at[slot] = held.add_fresh(self._no_overflows)
            elif behind is not None:
                continue
            elif slot.kind == "scale" and slot.key == "first":
                self._at[slot] = held.add_fresh(self._firsts[True])
            elif slot.kind == "copy":
                copy = self._copies[slot.index]
                assert copy is not None
                self._at[slot] = held.add(copy.stored)
            elif slot in known and slot.kind != "param":
                self._at[slot] = held.add(known[slot])
        if behind is not None:
            # The norms are computed in the graph, where the gradients are made.
            norms = set(ir.step_notes(self._graph).norms)
            step = split(self._graph, whole=False)
            self._measures = [p for p in step.pieces if p.outputs and norms.issuperset(p.outputs)]
            others = tuple(p for p in step.pieces if p not in self._measures)
            pieces = keep_results(join_small(Split(others, step.commits)))
            self._program = program.Program(pieces, known, behind)
            self._env: dict[fx.Node, Any] = {}

    # -- under a tracer ----------------------------------------------------------------------------

    def run(
        self,
        params: Sequence[torch.Tensor],
        arrived: Sequence[Arrived],
        found: Mapping[LossScale, torch.Tensor],
        held: Sequence[torch.Tensor],
    ) -> None:
        """Do the step under a tracer.

        Args:
            params, arrived: the parameters and gradients, in the order given before.
            found: for each loss scale how many gradients overflowed in these backwards: 0-d FP32.
            held: the held tensors.
        """
        assert not self.is_behind
        used = {a.scale: a.used for a in arrived if a.scale is not None}
        values: list[torch.Tensor] = []
        for slot in self._inputs:
            if slot.kind == "param":
                values.append(params[slot.index])
            elif slot.kind == "grad":
                values.append(arrived[slot.index].grad)
            elif slot.kind == "scale" and slot.key == "used":
                value = used[self.scales[slot.index]]
                assert value is not None
                values.append(value)
            else:
                values.append(self._held_value(slot, found, held))
        with torch.no_grad():
            self._run_in_stages(values)

    def _run_in_stages(self, values: Sequence[torch.Tensor]) -> None:
        """Run the step's graph, all numbers before all updates. On a CPU they are kept apart:
        Inductor would compute a bias correction again for every few elements. On a GPU all elements
        are computed at once, and a kernel more costs more.
        """
        nodes = [n for n in self._graph.graph.nodes if n.op == "call_function"]
        stages = stages_of(self._graph)
        before = [n for n in nodes if stages[n] < UPDATE]
        env = dict(zip(self._graph.graph.find_nodes(op="placeholder"), values, strict=True))
        run_nodes(before, env)
        updates = [n for n in nodes if stages[n] == UPDATE]
        read = {i for n in updates for i in n.all_input_nodes}
        numbers = [n for n in before if n in read and ir.value(n).ndim == 0]
        one_by_one = not capabilities(self._device).multi_tensor
        own = {**env, **(_kept({n: env[n] for n in numbers}) if one_by_one else {})}
        run_nodes(updates, own)
        run_nodes([n for n in nodes if stages[n] > UPDATE], {**own, **env})

    def _held_value(
        self, slot: Slot, found: Mapping[LossScale, torch.Tensor], held: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        value = held[self._at[slot]]
        if slot.kind == "copy":
            copy = self._copies[slot.index]
            assert copy is not None
            return copy.real_part(value, self._members[slot.index].param)
        if slot.kind == "scale" and slot.key == "flag":
            more = found.get(self.scales[slot.index])
            return value if more is None else value + more.to(torch.int64)
        return value

    def inputs(
        self,
        arrived: Sequence[Arrived],
        found: Mapping[LossScale, torch.Tensor],
        held: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Of a step behind the graph, what the graph must return for it; see `run`."""
        used = {a.scale: a.used for a in arrived if a.scale is not None}
        values: list[Any] = []
        for piece in self._measures:
            grads = [arrived[ir.slot_of(n).index].grad for n in piece.inputs]
            values += piece.graph(*grads)
        for slot in map(ir.slot_of, self._given_behind()):
            if slot.kind == "grad":
                values.append(arrived[slot.index].grad)
            elif slot.key == "used":
                values.append(used[self.scales[slot.index]])
            elif slot.key == "flag":
                values.append(self._held_value(slot, found, held))
        return values

    def _given_behind(self) -> list[fx.Node]:
        """The inputs of a step behind the graph that are made anew, other than by its scales."""
        return [n for s, n in self._program.given.items() if s.key != "first"]

    def _taken(self) -> list[fx.Node]:
        """What a step behind the graph takes from it: the norms, and its own inputs."""
        return [*(n for piece in self._measures for n in piece.outputs), *self._given_behind()]

    # -- in each step ------------------------------------------------------------------------------

    def broken_by(self) -> str | None:
        """What has changed of what the graph was made from, in a few words, or None."""
        return self._rests_on.broken_by(self._parts.optimizer)

    def still_holds(self) -> bool:
        """Whether all that the graph was made from is unchanged, or an input."""
        return self._rests_on.holds(self._parts.optimizer)

    def changed_settings(self) -> frozenset[Setting]:
        """The settings that were constants of the graph and have another value now."""
        return self._step_rests_on.constants.changed(self._parts.optimizer)

    def prepare(self, held: list[torch.Tensor]) -> None:
        """Bring the held tensors up to date for the step that comes."""
        self._settings.refresh(self._parts.optimizer.param_groups)
        for k, scale in enumerate(self.scales):
            overflows = guard.look(self.optimizer, scale)
            is_first = scale.begin_step()
            first = Slot("scale", k, "first")
            if self.is_behind and first in self._program.given:
                self._env[self._program.given[first]] = self._firsts[is_first]
            elif first in self._at:
                held[self._at[first]] = self._firsts[is_first]
            if (at := self._at.get(Slot("scale", k, "flag"))) is not None:
                held[at] = self._no_overflows if overflows is None else overflows.to(self._device)

    @property
    def wants(self) -> int:
        """How many results of the graph a step behind it takes."""
        return len(self._taken()) if self.is_behind else 0

    def take(self, values: Sequence[torch.Tensor]) -> None:
        """Do a step behind the graph, which returned these values for it."""
        env = {**self._env, **dict(zip(self._taken(), values, strict=True))}
        with torch.no_grad(), autocast_off():
            self._program.run(env)

    def done(self) -> None:
        """Note that the step has run."""
        note_step(self._parts.optimizer)  # schedulers ask
        note_step(self.optimizer)
        torch.autograd.graph.increment_version([m.param for m in self._members])
        for member, copy in zip(self._members, self._copies, strict=True):
            if copy is not None:
                copy.written(member.param)
        self._parts.watch.follow(self.scales)
        self._parts.watch.look()
        if not optimizers.state_of(self.optimizer).skips_by_itself:
            for scale in self.scales:
                scale.overflows.lookers.add(self.optimizer)


def _kept(numbers: Mapping[fx.Node, torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """The same 0-d values, computed once: through one vector of each dtype."""
    alike: dict[torch.dtype, list[fx.Node]] = {}
    for node, number in numbers.items():
        alike.setdefault(number.dtype, []).append(node)
    found: dict[fx.Node, torch.Tensor] = {}
    for nodes in alike.values():
        vector = torch.ops.mpcompile.kept.default(torch.stack([numbers[n] for n in nodes]))
        found.update(zip(nodes, vector.unbind(), strict=True))
    return found


def run_nodes(nodes: Sequence[fx.Node], env: dict[fx.Node, Any]) -> None:
    """Run calls of a graph, in order, with the values in `env`, which takes their results."""
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def _members(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> list[Member]:
    groups = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    return [Member(groups[id(p)], p) for p in params]
