"""An optimizer's step, traced and rewritten: its graph, and the tensors that it keeps.

It runs in pieces, over the gradients that a backward has stored (`step.py`), or with a forward and
backward in one graph (`whole_step/update.py`). What it rests on, what each step prepares and what
each step leaves behind is the same in both.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from .. import ir
from ..devices.registry import capabilities
from ..ir.dtypes import HALF
from ..ir.step import CopyLayout, Ranks, Slot, StepConfig
from ..ranks.shards import is_sharded, local
from ..scaling import guard
from ..scaling.copies import WorkingCopy, holders_beside
from . import pipeline
from .absent import Absent
from .elementwise import check_state, refuse_mixing
from .held_settings import HeldSettings
from .inputs import Member, Setting
from .key import StepKey
from .masters import entries_of, is_low, layout_of_copy, updated_by
from .reports import Results
from .rests_on import OfStep
from .separable import refuse_mixed
from .trace import Trace, trace

_Made = TypeVar("_Made")


class TracedStep:
    """The step of one optimizer for one key.

    Args:
        max_grad_norm, gathered: see `StepConfig`.
        results: where the step reports.
        dump: directory for the graph after every pass, or None.
        varying: settings whose floats are inputs of the graph.
        absent: the parameters, if some may have no gradient.

    Attributes:
        graph: rewritten by all passes.
        rounds: whether the optimizer computes in a low dtype by itself, as Muon does.
        rests_on: what must not change.
        held: the tensors that are the same in every step, by the slot of their input.
        firsts: the values, False and True, of the input "first" of a loss scale.
        no_overflows: the value of its input "flag" if no backward has run.

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
        dump: Path | None,
        varying: frozenset[Setting] = frozenset(),
        gathered: tuple[tuple[int, ...], ...] = (),
        absent: Absent | None = None,
    ) -> None:
        self.key, self.device = key, key.members[0].param.device
        multi_tensor = capabilities(self.device).multi_tensor
        config = StepConfig(
            gradients=key.gradients,
            copies=tuple(map(_layout, key.members, key.copies)),
            checked=key.checked,
            scales=tuple(scale.rule for scale in key.scales),
            max_grad_norm=max_grad_norm,
            foreach=multi_tensor and not varying,  # `_foreach_*` takes no 0-d tensors as numbers
            ranks=Ranks(ranks.groups, ranks.device) if (ranks := key.connected) else None,
            gathered=gathered,
            optional=absent is not None,
        )
        start = time.perf_counter()
        traced = _traced(optimizer, key, config, varying)
        self.graph = traced.graph
        values = map(ir.tensor, self.graph.graph.nodes)
        self.rounds = any(value.dtype in HALF for value in values if value is not None)
        pipeline.run(self.graph, config, traced_in=time.perf_counter() - start, dump=dump)
        self._settings = HeldSettings(optimizer, key.members, traced, varying)
        waiting = absent.waiting if absent is not None else ()
        self.rests_on = OfStep(optimizer, key.members, traced, self._settings, waiting)
        self.held = {
            **self._settings.tensors,
            **results.slots(self.device),
            **self._kept(optimizer),
            **(absent.held if absent is not None else {}),
        }
        self.no_overflows = torch.zeros((), dtype=torch.int64, device=self.device)
        self.firsts = [torch.tensor(flag, device=self.device) for flag in (False, True)]
        self._everyone = range(len(key.members))
        self._written, self._copied = self._changes(self._everyone)

    def _kept(self, optimizer: Optimizer) -> Mapping[Slot, torch.Tensor]:
        """Parameters, their copies and state, and the loss scales."""
        kept: dict[Slot, torch.Tensor] = {}
        for i, (member, copy) in enumerate(zip(self.key.members, self.key.copies, strict=True)):
            if not member.updated:
                continue
            kept[Slot("param", i)] = local(updated_by(optimizer, member.param))
            if copy is not None:
                kept[Slot("copy", i)] = copy.tensor
            elif is_low(member.param):
                kept[Slot("copy", i)] = local(member.param)
            for key, value in entries_of(optimizer, member.param).items():
                if isinstance(value, torch.Tensor):
                    kept[Slot("state", i, str(key))] = local(value)
        for k, scale in enumerate(self.key.scales):
            for field, tensor in scale.live.reside(self.device).items():
                kept[Slot("scale", k, field)] = tensor
        return kept

    def begin(
        self,
        optimizer: Optimizer,
        looking: Optimizer,
        places: Sequence[Sequence[Any]],
        env: Any,
    ) -> None:
        """Prepare for a step. Nothing waits for the device.

        Args:
            optimizer: whose step it is, with its settings.
            looking: the same, as loss scales know it: see `guard.look`.
            places: for each loss scale, under which keys `env` is to have its inputs "first" and
                "flag", or None.
            env: a dict or list that takes them.
        """
        self._settings.refresh(optimizer.param_groups)
        for scale, (first, flag) in zip(self.key.scales, places, strict=True):
            overflows = guard.look(looking, scale)
            is_first = scale.begin_step()
            if first is not None:
                env[first] = self.firsts[is_first]
            if flag is not None:
                known = self.no_overflows if overflows is None else overflows.to(self.device)
                env[flag] = known

    def lending(self, make: Callable[[], _Made]) -> _Made:
        """Call `make`, which makes something that holds tensors over the parameters' memory."""
        pairs = [(p, copy) for p, copy in self._copied if not is_sharded(p)]
        before = [holders_beside(param) for param, _ in pairs]
        made = make()
        for (param, copy), had in zip(pairs, before, strict=True):
            if lent := holders_beside(param) - had:
                copy.lent += lent
                weakref.finalize(made, copy.give_back, lent).atexit = False
        return made

    def ran(self, missing: Collection[int] = ()) -> None:
        """Tell autograd and the working copies that the step has run.

        Args:
            missing: the parameters (by index) that it has left as they are.
        """
        written, copied = self._written, self._copied
        if missing:
            written, copied = self._changes([i for i in self._everyone if i not in missing])
        torch.autograd.graph.increment_version(written)
        for param, copy in copied:
            copy.written(param)

    def _changes(
        self, indices: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, WorkingCopy]]]:
        """(What a step over these parameters writes, as autograd knows it; parameters with a copy
        that it writes, and the copy).
        """
        pairs = [(self.key.members[i], self.key.copies[i]) for i in indices]
        params = [member.param for member, _ in pairs if member.updated]
        copied = [(m.param, copy) for m, copy in pairs if copy is not None and m.updated]
        return [*params, *map(local, filter(is_sharded, params))], copied


def _layout(member: Member, copy: WorkingCopy | None) -> CopyLayout | None:
    return layout_of_copy(member.param) if copy is None else copy.layout


def _traced(
    optimizer: Optimizer, key: StepKey, config: StepConfig, varying: frozenset[Setting]
) -> Trace:
    """The step as its class does it, if that may run on shards, and without some parameters."""
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
    return traced
