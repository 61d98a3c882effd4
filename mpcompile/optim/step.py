"""One compiled step, bound to its tensors: norms, decision, updates, in this order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from .. import ir
from ..devices.registry import capabilities
from ..ir.step_config import FACTOR, SKIPPED, Slot
from ..ranks.shards import local
from ..scaling.copies import MasterWeight
from ..torch_inside.names import autocast_is_on, autocast_off, copy_all, set_grad_enabled
from .compiled import Cut, Emit, Program, serves_vectors, without_numbers
from .decide import Decision
from .eager import eager_step
from .fused import fused_step
from .traced_step import TracedStep
from .updates import UpdateGraph, in_call

_NOTHING = contextlib.nullcontext()
_Call = Callable[[Sequence[torch.Tensor]], object]


class CompiledStep:
    """The compiled step of one optimizer for one key.

    Args:
        traced: it, as graphs.
        emit: how these run.
        dump: directory for the graph of the decision, or None.
    """

    def __init__(self, traced: TracedStep, emit: Emit, dump: Path | None = None) -> None:
        self.key, self.traced, self.rests_on = traced.key, traced, traced.rests_on
        together = any(_is_together(graph, traced.held) for graph in traced.updates)
        shapes = [local(member.param).shape for member in self.key.members]
        self._decision = Decision(
            traced.config, traced.held, traced.fresh(), emit, dump, shapes=shapes, listed=together
        )
        self._calls = [c for g in traced.updates for c in _calls_of(g, traced.held, emit)]

    def run(self, optimizer: Optimizer) -> None:
        """Do the step over the gradients of its parameters."""
        gradients = [local(m.param.grad) for m in self.key.members]  # type: ignore[arg-type]  # there
        fresh = self.traced.begin(optimizer, optimizer)
        grad_mode = torch.is_grad_enabled()
        set_grad_enabled(False)  # `torch.no_grad()` takes longer than a small update
        try:
            with autocast_off() if autocast_is_on() else _NOTHING:
                if self._decision.is_needed:
                    fresh.update(self._decision.norms(gradients))
                self.take(optimizer, gradients, fresh)
        finally:
            set_grad_enabled(grad_mode)
        self.traced.ran()
        for scale in self.key.scales:
            scale.stepped()

    def take(
        self,
        optimizer: Optimizer,
        gradients: Sequence[torch.Tensor],
        fresh: Mapping[Slot, torch.Tensor],
    ) -> None:
        """Decide and update, without grad mode and autocast.

        Args:
            optimizer: whose step it is.
            gradients: of all parameters of its key.
            fresh: what the decision takes that is new in each step.
        """
        if self._decision.is_needed:
            self._decision.run(fresh)
        held, config = self.traced.held, self.traced.config
        skip = held[SKIPPED] if config.checked else None
        factor = held[FACTOR] if config.clipped else None
        if self.traced.fused:
            fused_step(optimizer, skip, factor)
        if self.traced.by_operator:
            eager_step(optimizer, self.key, skip, factor)
        for call in self._calls:
            call(gradients)


class _Bound:
    """A program, bound to its tensors.

    Args:
        slots: its inputs, among those of the step.
        held: the tensors that are the same in every step.
        numbers: those that another call leaves for this one; they are held, too.
    """

    def __init__(
        self,
        program: Program,
        slots: Sequence[Slot],
        held: Mapping[Slot, torch.Tensor],
        numbers: Mapping[Slot, torch.Tensor] = {},
    ) -> None:
        self._run = program.run
        self._arguments: list[Any] = [None] * len(slots)
        self._gradients: list[tuple[int, int, bool]] = []
        self._masters: list[tuple[int, torch.Tensor, bool]] = []
        for i, (slot, flat) in enumerate(zip(slots, program.flat, strict=False)):
            if slot.kind == "grad":
                self._gradients.append((i, slot.index, flat))
            elif isinstance(tensor := (numbers if slot in numbers else held)[slot], MasterWeight):
                # Its copy would be cast again in each forward while another tensor, by which it
                # may be written, holds its memory.
                self._masters.append((i, tensor, flat))
            else:
                tensor = torch.Tensor.detach(tensor)
                self._arguments[i] = _flattened(tensor) if flat else tensor

    def __call__(
        self, gradients: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor] = ()
    ) -> Sequence[Any]:
        arguments = [*self._arguments, *numbers]
        for i, master, flat in self._masters:
            # This is no access of the user's, which `master.detach()` would note.
            arguments[i] = _flattened(master) if flat else torch.Tensor.detach(master)
        for i, index, flat in self._gradients:
            gradient = gradients[index]
            arguments[i] = _flattened(gradient) if flat else gradient
        return self._run(arguments)


def _together(cut: Cut, held: Mapping[Slot, torch.Tensor], emit: Emit) -> _Call:
    """One update of all parameters, on a device on which each write of a number is a kernel."""
    first, last = Program.of(cut.numbers, emit), Program.of(cut.rest, emit)
    numbers = _Bound(first, first.slots, held)
    update = _Bound(last, [slot for slot in last.slots if slot.kind != "number"], held)
    targets = [held[slot] for slot, _ in cut.written]

    def call(gradients: Sequence[torch.Tensor]) -> None:
        found = numbers(gradients)
        update(gradients, found)
        if targets:
            copy_all(targets, [found[i] for _, i in cut.written])

    return call


def _calls_of(updates: UpdateGraph, held: Mapping[Slot, torch.Tensor], emit: Emit) -> list[_Call]:
    """The calls of one graph: of its numbers, then of the rest."""
    together, cut = _is_together(updates, held), None
    if emit.how == "inductor":
        cut = without_numbers(updates.graph, returned=together)
    if cut is not None and together:
        return [_together(cut, held, emit)]
    before: list[_Call] = []
    kept: Sequence[Mapping[Slot, torch.Tensor]] = [{}] * len(updates.calls)
    graph = updates.graph
    if cut is not None and (found := _numbers(cut.numbers, updates, held, emit)) is not None:
        graph, before, kept = cut.rest, [found[0]], found[1]
    program = Program.of(graph, emit)
    slots = [[in_call(slot, call) for slot in program.slots] for call in updates.calls]
    return [*before, *(_Bound(program, s, held, k) for s, k in zip(slots, kept, strict=True))]


def _is_together(updates: UpdateGraph, held: Mapping[Slot, torch.Tensor]) -> bool:
    """Whether one graph updates all, where a launch costs more than a small update."""
    device = next(iter(held.values())).device
    return len(updates.calls) == 1 and capabilities(device).multi_tensor


def _numbers(
    gm: fx.GraphModule, updates: UpdateGraph, held: Mapping[Slot, torch.Tensor], emit: Emit
) -> tuple[_Call, Sequence[Mapping[Slot, torch.Tensor]]] | None:
    """A call that computes the numbers of all calls at once, those that differ between them as
    vectors, and where each call finds its own. None: each computes its own, as where a parameter is
    a number itself.
    """
    places = {ir.slot_of(n): ir.value(n) for n in gm.graph.find_nodes(op="placeholder")}
    made = [slot for slot in places if slot.kind == "number"]
    slots = [[in_call(slot, call) for slot in places] for call in updates.calls]
    columns = [*zip(*slots, strict=True)]
    differ = [i for i, column in enumerate(columns) if len({*column}) > 1]
    vectors = [i for i, slot in enumerate(places) if differ and (i in differ or slot in made)]
    known = all(slot in held or slot in made for column in columns for slot in column)
    if not known or not serves_vectors(gm, vectors):
        return None
    device = next(iter(held.values())).device
    size = (len(slots),) if differ else ()
    memory = {s: torch.empty(size, dtype=places[s].dtype, device=device) for s in made}
    tensors = {**held, **memory}
    arguments = [
        [tensors[slot] for slot in column] if i in differ else tensors[column[0]]
        for i, column in enumerate(columns)
    ]
    run = Program.of(gm, emit, vectors).run

    def call(gradients: Sequence[torch.Tensor]) -> None:
        run([torch.stack(one) if type(one) is list else one for one in arguments])

    if not differ:  # a learning rate, say
        return call, [memory] * len(slots)
    each = zip(*(vector.unbind() for vector in memory.values()), strict=True)
    return call, [dict(zip(made, own, strict=True)) for own in each]


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
