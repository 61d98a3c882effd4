"""An optimizer's step inside of a whole training step.

The step is traced and rewritten as that of an `MPOptimizer` (`optim/`): checked, unscaled, clipped,
predicated; then its gradients come from the backward in the same graph, and are never stored. A
plain optimizer's step is treated alike, so it doesn't wait for the device either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from .. import ir
from ..devices.registry import capabilities
from ..errors import CannotRewrite
from ..ir.step import Slot
from ..optim.compile_piece import Emit
from ..optim.fingerprint import Fact, Fingerprint
from ..optim.first_state import gradients_stand_by, initialise_state
from ..optim.inputs import Member, Setting
from ..optim.join_pieces import join_small, keep_results
from ..optim.key import StepKey, Stored
from ..optim.optimizer import MPOptimizer
from ..optim.pieces import UPDATE, Split, split, stages_of
from ..optim.program import BoundPieces
from ..optim.reports import Notices, Results
from ..optim.traced_step import TracedStep
from ..ranks.shards import is_sharded
from ..scaling import hooks, optimizers
from ..scaling.copies import WorkingCopy
from ..scaling.loss_scale import LossScale
from ..scaling.overflows import Count
from ..torch_inside.amp import autocast_off
from ..torch_inside.optimizers import note_step
from .gradients import Arrived
from .held import Held
from .tracing import parameters_of


@dataclass(frozen=True)
class _Parts:
    """What belongs to the step of an optimizer.

    Attributes:
        optimizer: whose step is traced: of an MPOptimizer, the one that it wraps.
        max_grad_norm: clip the global 2-norm of the gradients to this, or None.
        own: the loss scale of parameters that no scaled model reads, or None: they aren't checked.
        results: where the step reports.
        notices: is told of each step.
        dump: directory for the graph of the step after every pass, or None.
        is_connected: whether other processes hold parts of the parameters.
    """

    optimizer: Optimizer
    max_grad_norm: float | None = None
    own: LossScale | None = None
    results: Results = field(default_factory=Results)
    notices: Notices = field(default_factory=Notices)
    dump: Path | None = None
    is_connected: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Parts:
        if not isinstance(optimizer, MPOptimizer):
            return cls(optimizer)
        return cls(
            optimizer.inner,
            optimizer._max_grad_norm,
            optimizer._own_scale,
            optimizer._results,
            optimizer._notices,
            optimizer._dump,
            optimizer._connected is not None,
        )


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
        inner: of an MPOptimizer, the one that it wraps.
        rests_on: what must not change of that one.
        constants: the settings that are constants of the graph.
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
        self._parts = parts = _Parts.of(optimizer)
        if parts.is_connected or any(map(is_sharded, params)):
            raise CannotRewrite("several processes hold the parameters")
        if any(a.grad.layout is not torch.strided for a in arrived):
            raise CannotRewrite("a gradient is sparse")
        self._key = key = _key(parts, params, arrived)
        self.scales = key.scales
        given = getattr(optimizer, "_given_scale", None)
        if given is not None and any(scale is not given for scale in self.scales):
            raise CannotRewrite("its MPOptimizer was given another loss scale")
        everyone = parameters_of(optimizer)
        with gradients_stand_by(everyone, params):
            initialise_state(parts.optimizer, key.members)
            self._step = TracedStep(
                parts.optimizer,
                key,
                max_grad_norm=parts.max_grad_norm,
                results=parts.results,
                dump=parts.dump,
                varying=varying,
            )
        self.inner, self.constants = parts.optimizer, self._step.rests_on.constants
        self.rounds = self._step.rounds
        self._everyone = everyone  # they live as long as this step, so their ids tell them
        self.rests_on = Fingerprint(
            Fact("other parameters", lambda o: [*map(id, parameters_of(o))], parts.optimizer),
            self._step.rests_on,
            Fact("hooks of its step", lambda _: hooks.has_others(optimizer), parts.optimizer),
        )
        self._graph = self._step.graph
        self._hold(held)
        self._given: Mapping[Slot, fx.Node] = {}  # inputs of the pieces that each step fills anew
        if behind is not None:
            self._part(behind)
        # For each loss scale, which held tensors or inputs of the pieces each step fills anew.
        places: Mapping[Slot, int | fx.Node] = {**self._given, **self._at}
        self._fresh = [
            [places.get(Slot("scale", k, name)) for name in ("first", "flag")]
            for k in range(len(self.scales))
        ]

    def _hold(self, held: Held) -> None:
        """Hold what the step reads and writes besides parameters and gradients."""
        self._inputs = [ir.slot_of(n) for n in self._graph.graph.find_nodes(op="placeholder")]
        self._at: dict[Slot, int] = {}
        for slot in self._inputs:
            if slot.kind == "scale" and slot.key == "flag":
                self._at[slot] = held.add_fresh(self._step.no_overflows)
            elif self.is_behind:
                continue
            elif slot.kind == "scale" and slot.key == "first":
                self._at[slot] = held.add_fresh(self._step.firsts[True])
            elif slot.kind == "copy":
                self._at[slot] = held.add(self._copy(slot).stored)
            elif slot in self._step.held and slot.kind != "param":
                self._at[slot] = held.add(self._step.held[slot])

    def _copy(self, slot: Slot) -> WorkingCopy:
        copy = self._key.copies[slot.index]
        assert copy is not None
        return copy

    def _part(self, behind: Emit) -> None:
        """Cut the step into pieces. The norms are computed in the graph, where the gradients are
        made.
        """
        norms = set(ir.step_notes(self._graph).norms)
        step = split(self._graph, whole=False)
        self._measures = [p for p in step.pieces if p.outputs and norms.issuperset(p.outputs)]
        others = tuple(p for p in step.pieces if p not in self._measures)
        pieces = keep_results(join_small(Split(others, step.commits)))
        self._program = BoundPieces(pieces, self._step.held, behind)
        self._given = self._program.given
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
        values = self._values(self._inputs, arrived, found, held, params)
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
        one_by_one = not capabilities(self._step.device).multi_tensor
        own = {**env, **(_kept({n: env[n] for n in numbers}) if one_by_one else {})}
        run_nodes(updates, own)
        run_nodes([n for n in nodes if stages[n] > UPDATE], {**own, **env})

    def _values(
        self,
        slots: Iterable[Slot],
        arrived: Sequence[Arrived],
        found: Mapping[LossScale, torch.Tensor],
        held: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        """The values of these inputs: see `run`."""
        used = {a.scale: a.used for a in arrived if a.scale is not None}

        def value(slot: Slot) -> torch.Tensor:
            if slot.kind == "param":
                return params[slot.index]
            if slot.kind == "grad":
                return arrived[slot.index].grad
            if slot.kind == "scale" and slot.key == "used":
                multiplier = used[self.scales[slot.index]]
                assert multiplier is not None
                return multiplier
            stored = held[self._at[slot]]
            if slot.kind == "copy":
                return WorkingCopy.real_part(stored, self._key.members[slot.index].param)
            if slot.kind == "scale" and slot.key == "flag":
                more = found.get(self.scales[slot.index])
                return stored if more is None else stored + more.to(torch.int64)
            return stored

        return [value(slot) for slot in slots]

    def inputs(
        self,
        arrived: Sequence[Arrived],
        found: Mapping[LossScale, torch.Tensor],
        held: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Of a step behind the graph, what the graph must return for it; see `run`."""
        norms: list[Any] = []
        for piece in self._measures:
            grads = [arrived[ir.slot_of(n).index].grad for n in piece.inputs]
            norms += piece.graph(*grads)
        return norms + self._values(map(ir.slot_of, self._given_behind()), arrived, found, held)

    def _given_behind(self) -> list[fx.Node]:
        """The inputs of a step behind the graph that are made anew, other than by its scales."""
        return [n for s, n in self._given.items() if s.key != "first"]

    def _taken(self) -> list[fx.Node]:
        """What a step behind the graph takes from it: the norms, and its own inputs."""
        return [*(n for piece in self._measures for n in piece.outputs), *self._given_behind()]

    # -- in each step ------------------------------------------------------------------------------

    def prepare(self, held: list[torch.Tensor]) -> None:
        """Bring the held tensors up to date for the step that comes."""
        values: dict[int | fx.Node, torch.Tensor] = {}
        self._step.begin(self._parts.optimizer, self.optimizer, self._fresh, values)
        for place, value in values.items():
            if isinstance(place, int):
                held[place] = value
            else:
                self._env[place] = value

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
        self._step.ran()
        self._parts.notices.follow(self.scales)
        self._parts.notices.look()
        if not optimizers.state_of(self.optimizer).skips_by_itself:
            for scale in self.scales:
                scale.overflows.looks.setdefault(self.optimizer, Count())


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


def _key(parts: _Parts, params: Sequence[torch.Tensor], arrived: Sequence[Arrived]) -> StepKey:
    """What a step over these parameters is traced for."""
    groups = parts.optimizer.param_groups
    index = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    members = [Member(index[id(p)], p) for p in params]
    arriving = [Stored(a.grad.dtype, a.grad.stride(), a.scale) for a in arrived]
    return StepKey.of(members, parts.own, arriving=arriving)
