"""One compiled step, bound to its tensors: for one pattern of gradients, or for many (`Absent`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from ..devices.registry import capabilities
from ..ir.step import Ranks, Slot, StepConfig
from ..ranks.shards import is_sharded, local
from ..state import guard
from ..state.copies import WorkingCopy
from ..torch_inside.amp import autocast_is_on, autocast_off
from ..torch_inside.autograd import set_grad_enabled
from . import pipeline
from .absent import Absent
from .apart import refuse_mixed
from .compile_piece import Emit
from .elementwise import check_state, refuse_mixing
from .gathered import Gathered
from .held_settings import HeldSettings
from .inputs import Member, Setting
from .join_pieces import join_small, keep_results
from .key import StepKey
from .pieces import FEW, SMALL, split
from .program import Program
from .rests_on import OfStep
from .results import Results
from .trace import Trace, trace

_NOTHING = contextlib.nullcontext()


class CompiledStep:
    """The compiled step of one optimizer for one key.

    Args:
        optimizer: whose step it is.
        key: what to compile it for.
        max_grad_norm: see `StepConfig`.
        results: where the step reports.
        emit: how its pieces are run.
        dump: directory for the graph after every pass, or None.
        varying: settings whose floats are inputs of the graph.
        absent: the parameters of the key, if some may have no gradient; the state that waits for
            their first one is in the optimizer's own meanwhile (`state_stands_by`).

    Raises:
        StateAppeared, CannotRewrite: see `trace`.
        ParametersMix: some may have no gradient, and the others would be updated in another way.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        key: StepKey,
        *,
        max_grad_norm: float | None,
        results: Results,
        emit: Emit,
        dump: Path | None,
        varying: frozenset[Setting] = frozenset(),
        absent: Absent | None = None,
    ) -> None:
        self.key, self.absent = key, absent
        self.device = key.members[0].param.device
        multi_tensor = capabilities(self.device).multi_tensor
        whole = multi_tensor or emit.how != "inductor"
        gathering = () if whole else key.members
        n = len(gathering)
        self.gathered = Gathered(gathering, key.gradients[:n], key.strides[:n])
        config = StepConfig(
            gradients=key.gradients,
            copies=tuple(c.layout if c is not None else None for c in key.copies),
            checked=key.checked,
            scales=tuple(scale.rule for scale in key.scales),
            max_grad_norm=max_grad_norm,
            foreach=multi_tensor and not varying,  # `_foreach_*` takes no 0-d tensors as numbers
            ranks=Ranks(ranks.groups, ranks.device) if (ranks := key.connected) else None,
            gathered=self.gathered.groups,
            optional=absent is not None,
        )
        traced = _traced(optimizer, key, config, varying, dump)
        waiting = absent.waiting if absent is not None else ()
        taking_part = {m.group for m in key.members if m.updated}
        self.settings = HeldSettings(
            optimizer.param_groups, taking_part, traced, varying, self.device
        )
        self.rests_on = OfStep(optimizer, key.members, traced, self.settings, waiting)
        pieces = split(traced.graph, whole=whole, together=_is_tiny(key))
        if not whole:
            pieces = keep_results(join_small(pieces))
        self.program = Program(pieces, self._held(optimizer, results), emit)
        self.no_overflows = torch.zeros((), dtype=torch.int64, device=self.device)
        self.first = [torch.tensor(flag, device=self.device) for flag in (False, True)]
        self.written = _written(key.members)
        given = self.program.given
        self.gradients = [
            (node, i)
            for i in range(len(key.members))
            if (node := given.get(Slot("grad", i))) is not None
        ]
        # For each scale, which inputs of the graph it fills anew in each step.
        self.scale_inputs = [
            [given.get(Slot("scale", k, name)) for name in ("first", "flag", "used")]
            for k in range(len(key.scales))
        ]
        self.copied = _copied(key)

    def _held(self, optimizer: Optimizer, results: Results) -> dict[Slot, Any]:
        """The tensors that are the same in every step."""
        held: dict[Slot, Any] = {
            **self.settings.tensors,
            **results.slots(self.device),
            **self.gathered.held,
            **(self.absent.held if self.absent is not None else {}),
        }
        for i, (member, copy) in enumerate(zip(self.key.members, self.key.copies, strict=True)):
            if not member.updated:
                continue
            held[Slot("param", i)] = local(member.param)
            if copy is not None:
                held[Slot("copy", i)] = copy.tensor
            for key, value in optimizer.state.get(member.param, {}).items():
                if isinstance(value, torch.Tensor):
                    held[Slot("state", i, str(key))] = local(value)
        for k, scale in enumerate(self.key.scales):
            for field, tensor in scale.reside(self.device).items():
                held[Slot("scale", k, field)] = tensor
        return held

    def still_holds(self, optimizer: Optimizer) -> bool:
        """Whether all that the graph was made from is unchanged, or an input. What waited for a
        first gradient that is here now is the optimizer's from then on.
        """
        if self.absent is not None and self.absent.waiting:
            firsts = self.absent.take_in(optimizer)
            if firsts is None:
                return False
            self.rests_on.state.take_in(optimizer, firsts)
        return self.rests_on.holds(optimizer)

    def run(self, optimizer: Optimizer) -> None:
        """Do the step."""
        multipliers = self.key.multipliers()
        env: dict[fx.Node, Any] = {}
        self.settings.refresh(optimizer.param_groups)
        for k, (scale, inputs) in enumerate(zip(self.key.scales, self.scale_inputs, strict=True)):
            first, flag, used = inputs
            overflows = guard.look(optimizer, scale)
            is_first = scale.begin_step()
            if first is not None:
                env[first] = self.first[is_first]
            if flag is not None:
                env[flag] = self.no_overflows if overflows is None else overflows.to(self.device)
            if used is not None:
                env[used] = multipliers[k]
        grad_mode = torch.is_grad_enabled()
        set_grad_enabled(False)  # `torch.no_grad()` takes longer than a small update
        try:
            with autocast_off() if autocast_is_on() else _NOTHING:
                if self.absent is None:
                    self._run_all(env)
                else:
                    self._run_some(self.absent, env)
        finally:
            set_grad_enabled(grad_mode)

    def _run_all(self, env: dict[fx.Node, Any]) -> None:
        members = self.key.members
        for node, i in self.gradients:
            env[node] = local(members[i].param.grad)  # type: ignore[arg-type]  # it is there
        self.gathered.fill()
        self.program.run(env)
        torch.autograd.graph.increment_version(self.written)
        for param, copy in self.copied:
            copy.written(param)

    def _run_some(self, absent: Absent, env: dict[fx.Node, Any]) -> None:
        """The same where some parameters have no gradient."""
        missing = absent.look()
        gradients = absent.gradients()
        env |= {node: gradients[i] for node, i in self.gradients}
        self.gathered.fill(gradients)
        with absent.left_alone([copy.stored if copy else None for copy in self.key.copies]):
            self.program.run(env, missing)
        present = [m for i, m in enumerate(self.key.members) if i not in missing]
        torch.autograd.graph.increment_version(_written(present))
        params = {id(m.param) for m in present}
        for param, copy in self.copied:
            if id(param) in params:
                copy.written(param)


def _is_tiny(key: StepKey) -> bool:
    """Whether a call costs more than the norm of a gradient, and there are so few that one function
    of all numbers compiles about as fast as one for each kind.
    """
    sizes = [local(member.param).numel() for member in key.members]
    return len(sizes) <= FEW and max(sizes) <= SMALL


def _written(members: Iterable[Member]) -> list[torch.Tensor]:
    """The tensors that a step over these members writes, as autograd knows them."""
    params = [m.param for m in members if m.updated]
    return [*params, *map(local, filter(is_sharded, params))]


def _copied(key: StepKey) -> list[tuple[torch.Tensor, WorkingCopy]]:
    """The parameters with a working copy that the step writes, and the copy."""
    pairs = zip(key.members, key.copies, strict=True)
    return [(m.param, copy) for m, copy in pairs if copy is not None and m.updated]


def _traced(
    optimizer: Optimizer,
    key: StepKey,
    config: StepConfig,
    varying: frozenset[Setting],
    dump: Path | None,
) -> Trace:
    """The step, traced and rewritten by all passes."""
    start = time.perf_counter()
    if key.connected is not None:
        check_state(key.members, optimizer)

    def traced_over(indices: Sequence[int]) -> Trace:
        members = [key.members[i] for i in indices]
        strides = [key.strides[i] for i in indices]
        return trace(optimizer, members, foreach=config.foreach, varying=varying, strides=strides)

    everyone = range(len(key.members))
    traced = traced_over(everyone)
    if key.connected is not None:
        refuse_mixing(traced.graph.graph, key.members)
    if config.optional:
        some = everyone[::2]
        refuse_mixed(traced.graph.graph, traced_over(some).graph.graph, some)
    pipeline.run(traced.graph, config, traced_in=time.perf_counter() - start, dump=dump)
    return traced
