"""An optimizer's step inside of a whole training step.

The step is traced and rewritten as that of an `MPOptimizer` (`optim/`): checked, clipped,
predicated; then its gradients come from the backward in the same graph, and are never stored. A
plain optimizer's step is treated alike, so it doesn't wait for the device either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from ..optim.inputs import Member, Setting, parameters_of
from ..optim.join_pieces import join_small, keep_results
from ..optim.key import StepKey, Stored
from ..optim.masters import is_low
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
from ..settings import Settings
from ..torch_inside.amp import autocast_off
from ..torch_inside.optimizers import note_step
from .extra_inputs import Held

_FEW = 16  # parameters: with more, the graph takes longer to compile than the step can ever save


@dataclass(frozen=True)
class _Parts:
    """What belongs to the step of an optimizer.

    Attributes:
        optimizer: whose step is traced: of an MPOptimizer, the one that it wraps.
        own: the loss scale of parameters that no scaled model reads, or None: they aren't checked.
        given: the only loss scale that its models may have, or None.
        is_connected: whether other processes hold parts of the parameters.
    """

    optimizer: Optimizer
    max_grad_norm: float | None = None
    own: LossScale | None = None
    given: LossScale | None = None
    results: Results = field(default_factory=Results)
    notices: Notices = field(default_factory=Notices)
    dump: Path | None = None
    is_connected: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Parts:
        if not isinstance(optimizer, MPOptimizer):
            return cls(optimizer)
        o = optimizer
        scales = o._own_scale, o._given_scale
        shared = o._connected is not None
        return cls(o.inner, o._max_grad_norm, *scales, o._results, o._notices, o._dump, shared)


class Update:
    """One optimizer's step, for parameters that have a gradient.

    Args:
        arrived: the gradients of the parameters.
        varying: settings whose floats are inputs, because they were seen to change.
        held: takes the tensors that the step reads and writes.
        behind: how its pieces run behind the graph, if it isn't a part of the graph.

    Attributes:
        inner: of an MPOptimizer, the one that it wraps.
        rests_on: what must not change of that one.
        constants: the settings that are constants of the graph.
        rounds: whether it computes in a low dtype by itself, as Muon does.

    Raises:
        StateAppeared, CannotRewrite: see `optim.trace`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[torch.Tensor],
        arrived: Sequence[torch.Tensor],
        varying: frozenset[Setting],
        held: Held,
        behind: Emit | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.is_behind = behind is not None
        self._parts = parts = _Parts.of(optimizer)
        if parts.is_connected or any(map(is_sharded, params)):
            raise CannotRewrite("several processes hold the parameters")
        if any(g.layout is not torch.strided for g in arrived):
            raise CannotRewrite("a gradient is sparse")
        if optimizer is parts.optimizer and any(map(is_low, params)):
            raise CannotRewrite(
                f"{type(optimizer).__name__} updates weights that are stored low, and keeps no "
                "FP32 masters of them; wrap it in an MPOptimizer"
            )
        self._key = key = _key(parts, params, arrived)
        self.scales = key.scales
        if parts.given is not None and any(scale is not parts.given for scale in self.scales):
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
        if behind is not None:
            self._part(behind)
        # For each loss scale, which held tensors each step replaces.
        self._fresh = [
            [self._at.get(Slot("scale", k, name)) for name in ("first", "flag")]
            for k in range(len(self.scales))
        ]

    def _hold(self, held: Held) -> None:
        """Hold what the step reads and writes besides parameters and gradients."""
        self._inputs = [ir.slot_of(n) for n in self._graph.graph.find_nodes(op="placeholder")]
        self._at: dict[Slot, int] = {}
        for slot in self._inputs:
            if slot.kind == "scale" and slot.key == "flag":
                self._at[slot] = held.add_fresh(self._step.no_overflows)
            elif slot.kind == "scale" and slot.key == "first":
                self._at[slot] = held.add_fresh(self._step.firsts[True])
            elif self.is_behind:
                continue
            elif slot.kind == "copy" and (copy := self._key.copies[slot.index]) is not None:
                self._at[slot] = held.add(copy.stored)
            elif slot in self._step.held and not self._is_given(slot):
                self._at[slot] = held.add(self._step.held[slot])

    def _is_given(self, slot: Slot) -> bool:
        """Whether an input of the step is a parameter as the model has it, and not its master."""
        low = slot.kind in ("param", "copy") and is_low(self._key.members[slot.index].param)
        return slot.kind == ("copy" if low else "param")

    def _part(self, behind: Emit) -> None:
        """Cut the step into pieces. The norms are computed in the graph, where the gradients are
        made.
        """
        norms = set(ir.step_notes(self._graph).norms)
        step = split(self._graph, whole=False)
        self._measures = [p for p in step.pieces if p.outputs and norms.issuperset(p.outputs)]
        others = tuple(p for p in step.pieces if p not in self._measures)
        pieces = keep_results(join_small(Split(others, step.commits)))
        held = self._step.held
        self._program = self._step.lending(lambda: BoundPieces(pieces, held, behind))
        given = self._program.given
        self._firsts = {n: self._at[s] for s, n in given.items() if s.key == "first"}
        self._given = {s: n for s, n in given.items() if s.key != "first"}
        measured = [n for piece in self._measures for n in piece.outputs]
        self._taken = [*measured, *self._given.values()]

    # -- under a tracer ----------------------------------------------------------------------------

    def run(
        self,
        params: Sequence[torch.Tensor],
        arrived: Sequence[torch.Tensor],
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
        arrived: Sequence[torch.Tensor],
        found: Mapping[LossScale, torch.Tensor],
        held: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        """The values of these inputs: see `run`."""

        def value(slot: Slot) -> torch.Tensor:
            if self._is_given(slot):
                return params[slot.index]
            if slot.kind == "grad":
                return arrived[slot.index]
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
        arrived: Sequence[torch.Tensor],
        found: Mapping[LossScale, torch.Tensor],
        held: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Of a step behind the graph, what the graph must return for it; see `run`."""
        norms: list[Any] = []
        for piece in self._measures:
            grads = [arrived[ir.slot_of(n).index] for n in piece.inputs]
            norms += piece.graph(*grads)
        return norms + self._values(self._given, arrived, found, held)

    # -- in each step ------------------------------------------------------------------------------

    def prepare(self, held: list[torch.Tensor]) -> None:
        """Bring the held tensors up to date for the step that comes."""
        self._step.begin(self._parts.optimizer, self.optimizer, self._fresh, held)

    def take(self, values: Iterator[torch.Tensor], held: Sequence[torch.Tensor]) -> None:
        """Do a step behind the graph: `values` are what the graph returned, from there on."""
        env = {node: held[at] for node, at in self._firsts.items()}
        env |= {node: next(values) for node in self._taken}
        with torch.no_grad(), autocast_off():
            self._program.run(env)

    def skipped(self) -> torch.Tensor:
        """0-d bool on the device: whether the last step was skipped."""
        return self._parts.results.read("skipped", False)

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


def emit_behind(device: torch.device, count: int, settings: Settings) -> Emit | None:
    """How the pieces of a last step over so many parameters run behind the graph; None: it is a
    part of the graph.

    On a CPU, a function with the updates of many parameters takes Inductor longer than all else. As
    pieces they are compiled once for each kind.
    """
    if count <= _FEW or settings.emit != "inductor" or capabilities(device).multi_tensor:
        return None
    return Emit("inductor", settings.mode, tuple(sorted((settings.options or {}).items())))


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


def _key(parts: _Parts, params: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor]) -> StepKey:
    """What a step over these parameters is traced for."""
    groups = parts.optimizer.param_groups
    index = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    members = [Member(index[id(p)], p) for p in params]
    arriving = [Stored(g.dtype, g.stride()) for g in arrived]
    return StepKey.of(members, parts.own, arriving=arriving)
