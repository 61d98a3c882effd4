"""An optimizer's step inside of a whole training step.

The step is traced and rewritten as that of an `MPOptimizer` (`optim/`): checked, clipped,
predicated; then its gradients come from the backward in the same graph, and are never stored. A
plain optimizer's step is treated alike, so it doesn't wait for the device either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from .. import ir
from ..devices.registry import capabilities
from ..errors import CannotRewrite
from ..ir.step_config import Slot
from ..optim.compiled import Emit, without_numbers
from ..optim.compiled_steps import FEW
from ..optim.decide import decided, norms_of, written_by_decision
from ..optim.first_state import gradients_stand_by, initialise_state, with_gradients
from ..optim.fused import fits
from ..optim.kinds import ParametersMix
from ..optim.masters import is_low
from ..optim.members import Member, Setting, StepKey, Stored
from ..optim.optimizer import MPOptimizer
from ..optim.reports import Results
from ..optim.rests_on import Fact, Fingerprint
from ..optim.step import CompiledStep
from ..optim.traced_step import TracedStep
from ..optim.updates import Updates, config_of
from ..ranks.shards import is_sharded
from ..scaling import hooks, parameters
from ..scaling.copies import WorkingCopy
from ..scaling.loss_scale import LossScale
from ..scaling.overflows import Count
from ..scaling.parameters import parameters_of
from ..settings import Settings
from ..torch_inside.names import autocast_off
from ..torch_inside.optimizers import note_step
from .forward import ExtraInputs


class Update:
    """One optimizer's step, for parameters that have a gradient.

    Args:
        arrived: the gradients of the parameters.
        varying: settings whose floats are inputs, because they were seen to change.
        held: takes the tensors that the step reads and writes.
        late: how it runs after the graph, if it isn't a part of the graph.

    Attributes:
        inner: whose step is traced: of an MPOptimizer, the one that it wraps.
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
        held: ExtraInputs,
        late: Emit | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.is_late = late is not None
        ours = optimizer if isinstance(optimizer, MPOptimizer) else None
        self.inner = inner = optimizer if ours is None else ours.inner
        self._results = Results() if ours is None else ours._results
        self._dump = None if ours is None else ours._dump
        shared = ours is not None and ours._connected is not None
        if shared or any(map(is_sharded, params)):
            raise CannotRewrite("several processes hold the parameters")
        if any(g.layout is not torch.strided for g in arrived):
            raise CannotRewrite("a gradient is sparse")
        if ours is None and any(map(is_low, params)):
            raise CannotRewrite(
                f"{type(optimizer).__name__} updates weights that are stored low, and keeps no "
                "FP32 masters of them; wrap it in an MPOptimizer"
            )
        # Without one, parameters that no scaled model reads aren't checked.
        own = None if ours is None else ours._own_scale
        index = {id(p): i for i, group in enumerate(inner.param_groups) for p in group["params"]}
        members = [Member(index[id(p)], p) for p in params]
        arriving = [Stored(g.dtype, g.stride()) for g in arrived]
        self._key = key = StepKey.of(members, own, arriving=arriving)
        self.scales = key.scales
        given = None if ours is None else ours._given_scale
        if given is not None and any(scale is not given for scale in self.scales):
            raise CannotRewrite("its MPOptimizer was given another loss scale")
        self._config = config_of(key, None if ours is None else ours._max_grad_norm)
        self._everyone = parameters_of(optimizer)  # kept alive, so that their ids tell them
        with gradients_stand_by(self._everyone, params):
            initialise_state(inner, key.members)
            updates, late = self._traced(varying, late)
            traced = TracedStep(inner, key, self._config, updates, self._results)
        self._step, self.constants = traced, traced.rests_on.constants
        self.rounds = updates is not None and updates.rounds
        self.rests_on = Fingerprint(
            Fact("other parameters", lambda o: [*map(id, parameters_of(o))], inner),
            traced.rests_on,
            Fact("hooks of its step", lambda _: hooks.has_others(optimizer), inner),
        )
        self._late = CompiledStep(traced, late, self._dump) if late is not None else None
        self._hold(held)

    def _traced(
        self, varying: frozenset[Setting], late: Emit | None
    ) -> tuple[Updates | None, Emit | None]:
        """What the optimizer does to the parameters, and how it runs after the graph."""

        def traced(together: bool) -> Updates:
            return Updates(
                self.inner, self._key, self._config,
                together=together, dump=self._dump, varying=varying,
            )  # fmt: skip

        if late is None:
            return traced(together=True), None
        if fits(self.inner, self._key):
            return None, late
        try:
            return traced(together=False), late
        except ParametersMix:
            return traced(together=True), replace(late, how="eager")

    def _hold(self, held: ExtraInputs) -> None:
        """Hold what the step reads and writes besides parameters and gradients."""
        fresh = self._step.fresh()
        self._at = {slot: held.add_fresh(tensor) for slot, tensor in fresh.items()}
        self._decided = written_by_decision(self._config)
        if self.is_late:
            return
        (update,) = self._step.updates
        self._graph = update.graph
        for slot in dict.fromkeys([*ir.slots(self._graph.graph), *self._decided]):
            if slot.kind == "copy" and (copy := self._key.copies[slot.index]) is not None:
                self._at[slot] = held.add(copy.stored)
            elif slot in self._step.held and not self._is_given(slot):
                self._at[slot] = held.add(self._step.held[slot])

    def _is_given(self, slot: Slot) -> bool:
        """Whether an input of the step is a parameter as the model has it, and not its master."""
        if slot.kind not in ("param", "copy"):
            return False
        return slot.kind == ("copy" if is_low(self._key.members[slot.index].param) else "param")

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
        assert not self.is_late
        with torch.no_grad():
            known = {slot: held[at] for slot, at in self._at.items()}
            new: dict[Slot, torch.Tensor] = {}
            if self._decided:
                new = decided(self._config, {**known, **self._fresh(arrived, found, held)})

            def value(slot: Slot) -> torch.Tensor:
                if self._is_given(slot):
                    return params[slot.index]
                if slot.kind == "grad":
                    return arrived[slot.index]
                if slot.kind == "copy":
                    return WorkingCopy.real_part(known[slot], self._key.members[slot.index].param)
                return new.get(slot, known[slot])

            self._update(value)
            for slot, decision in new.items():
                if decision is not known[slot]:
                    known[slot].copy_(decision)

    def _update(self, value: Callable[[Slot], torch.Tensor]) -> None:
        """Run the graph of the update, all numbers before all else. On a CPU they are kept apart:
        Inductor would compute a bias correction again for every few elements. On a GPU all elements
        are computed at once, and a kernel more costs more.
        """
        cut = without_numbers(self._graph, returned=True)
        if cut is None:
            self._graph.forward(*map(value, ir.slots(self._graph.graph)))
            return
        numbers = cut.numbers.forward(*map(value, ir.slots(cut.numbers.graph)))
        if not capabilities(self._step.device).multi_tensor:
            numbers = _kept(numbers)
        slots = [slot for slot in ir.slots(cut.rest.graph) if slot.kind != "number"]
        cut.rest.forward(*map(value, slots), *numbers)
        for slot, i in cut.written:
            value(slot).copy_(numbers[i])

    def _fresh(
        self,
        arrived: Sequence[torch.Tensor],
        found: Mapping[LossScale, torch.Tensor],
        held: Sequence[torch.Tensor],
    ) -> dict[Slot, torch.Tensor]:
        """What a decision takes that follows from the backwards: see `run`."""
        fresh = norms_of(arrived, self._config)
        for slot in filter(lambda s: s.key == "flag", self._at):
            more = found.get(self.scales[slot.index])
            flag = held[self._at[slot]]
            fresh[slot] = flag if more is None else flag + more.to(torch.int64)
        return fresh

    def inputs(
        self,
        arrived: Sequence[torch.Tensor],
        found: Mapping[LossScale, torch.Tensor],
        held: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Of a step after the graph, what the graph must return for it; see `run`."""
        fresh = self._fresh(arrived, found, held) if self._decided else {}
        self._taken = [*fresh]
        return [*fresh.values(), *arrived]

    # -- in each step ------------------------------------------------------------------------------

    def prepare(self, held: list[torch.Tensor]) -> None:
        """Bring the held tensors up to date for the step that comes."""
        for slot, tensor in self._step.begin(self.inner, self.optimizer).items():
            held[self._at[slot]] = tensor

    def take(self, values: Iterator[torch.Tensor], held: Sequence[torch.Tensor]) -> None:
        """Do a step after the graph: `values` are what the graph returned, from there on."""
        assert self._late is not None
        fresh = {slot: held[at] for slot, at in self._at.items()}
        fresh |= {slot: next(values) for slot in self._taken}
        params = [member.param for member in self._key.members]
        gradients = [next(values) for _ in params]
        given = with_gradients(params, gradients) if self._step.fused else contextlib.nullcontext()
        with torch.no_grad(), autocast_off(), given:
            self._late.take(self.inner, gradients, fresh)

    def skipped(self) -> torch.Tensor:
        """0-d bool on the device: whether the last step was skipped."""
        return self._results.read("skipped", False)

    def done(self) -> None:
        """Note that the step has run."""
        note_step(self.inner)  # schedulers ask
        note_step(self.optimizer)
        self._step.ran()
        skips_by_itself = parameters.of_optimizer(self.optimizer).skips_by_itself
        for scale in self.scales:
            scale.stepped()
            if not skips_by_itself:
                scale.overflows.looks.setdefault(self.optimizer, Count())


def emit_late(device: torch.device, count: int, settings: Settings) -> Emit | None:
    """How a last step over so many parameters runs after the graph; None: it is a part of it.

    On a CPU, a function with the updates of many parameters takes Inductor longer than all else.
    After the graph they are compiled once for each kind.
    """
    if count <= FEW or settings.emit != "inductor" or capabilities(device).multi_tensor:
        return None
    options = tuple(sorted((settings.options or {}).items()))
    return Emit("inductor", settings.mode, options, settings.verify.when, settings.strict)


def _kept(numbers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same 0-d values, computed once: through one vector of each dtype."""
    found = [*numbers]
    for dtype in dict.fromkeys(number.dtype for number in numbers):
        alike = [i for i, number in enumerate(numbers) if number.dtype is dtype]
        vector = torch.ops.mpcompile.kept.default(torch.stack([numbers[i] for i in alike]))
        for i, number in zip(alike, vector.unbind(), strict=True):
            found[i] = number
    return found
