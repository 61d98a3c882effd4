"""The step of an optimizer for one key: its graphs, and the tensors that it keeps.

    decision    whether to skip, by what to clip, how the loss scales move (`decide.py`)
    updates     what updates the parameters (`updates.py`), or torch's fused kernel (`fused.py`)

It runs over the gradients that a backward has stored (`step.py`), or with a forward and backward in
one graph (`whole_step/update.py`). What it rests on, what each step prepares and what each step
leaves behind is the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..ir.step_config import FACTOR, Slot
from ..ranks.shards import is_sharded, local
from ..scaling import guard
from .fused import settings_of
from .masters import entries_of, is_low, updated_by
from .members import Member, Setting, StepConfig, StepKey, has_lr, setting_floats
from .reports import Results
from .rests_on import Fact, OfStep
from .trace import Trace
from .updates import UpdateGraph, Updates


class TracedStep:
    """The step of one optimizer for one key.

    Args:
        config: its settings: see `config_of`.
        updates: what the optimizer does to these parameters, and maybe to others; None: its class
            does it, by its fused kernel or `by_operator`.
        results: where the step reports.

    Attributes:
        updates: the graphs that update the parameters.
        fused, by_operator: whether torch's fused kernel does, or the class operator by operator.
        rests_on: what must not change.
        held: the tensors that are the same in every step, by the slot of their input.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        key: StepKey,
        config: StepConfig,
        updates: Updates | None,
        results: Results,
        *,
        by_operator: bool = False,
    ) -> None:
        self.key, self.config, self.device = key, config, key.members[0].param.device
        self.fused, self.by_operator = updates is None and not by_operator, by_operator
        self.updates: Sequence[UpdateGraph] = ()
        self._settings: HeldSettings | None = None
        if by_operator:
            self.rests_on = OfStep(optimizer, ())  # the class reads all again
        elif updates is None:
            served = Fact("settings that torch's kernel lacks", settings_of, optimizer)
            self.rests_on = OfStep(optimizer, key.members, (), served)
        else:
            self.updates = updates.of(optimizer, key) or ()
            settings = HeldSettings(optimizer, key.members, updates.traces, updates.varying)
            facts, self._settings = settings.facts(optimizer), settings
            self.rests_on = OfStep(optimizer, key.members, updates.traces, *facts)
        factor = torch.ones((), dtype=config.norm_dtype, device=self.device)
        self.held = {
            **(self._settings.tensors if self._settings is not None else {}),
            **results.slots(self.device),
            FACTOR: factor,
            **self._kept(optimizer),
        }
        self._firsts = [torch.tensor(flag, device=self.device) for flag in (False, True)]
        self._no_overflows = torch.zeros((), dtype=torch.int64, device=self.device)
        pairs = zip(key.members, key.copies, strict=True)
        copied = [(m.param, copy) for m, copy in pairs if copy is not None and m.updated]
        self._copied = [] if by_operator else copied  # the class writes no copies
        params = [member.param for member in key.members if member.updated]
        copies = [copy.stored for _, copy in self._copied]
        self._written = [*params, *map(local, filter(is_sharded, params)), *copies]

    def _kept(self, optimizer: Optimizer) -> Mapping[Slot, torch.Tensor]:
        """Parameters, their copies and state, and the loss scales."""
        kept: dict[Slot, torch.Tensor] = {}
        for i, (member, copy) in enumerate(zip(self.key.members, self.key.copies, strict=True)):
            if not member.updated or self.by_operator:
                continue
            kept[Slot("param", i)] = local(updated_by(optimizer, member.param))
            if copy is not None:
                kept[Slot("copy", i)] = copy.tensor
            elif is_low(member.param):
                kept[Slot("copy", i)] = local(member.param)
            for key, value in entries_of(optimizer, member.param).items():
                if isinstance(value, torch.Tensor):
                    kept[Slot("state", i, str(key))] = local(value)
        for k, scale in enumerate(self.key.scales if self.config.checked else ()):
            for field, tensor in scale.live.reside(self.device).items():
                kept[Slot("scale", k, field)] = tensor
        return kept

    def fresh(self) -> dict[Slot, torch.Tensor]:
        """Tensors like those that `begin` returns."""
        scales = range(len(self.key.scales)) if self.config.checked else ()
        flags = {Slot("scale", k, "flag"): self._no_overflows for k in scales}
        return {**flags, **{Slot("scale", k, "first"): self._firsts[True] for k in scales}}

    def begin(self, optimizer: Optimizer, looking: Optimizer) -> dict[Slot, torch.Tensor]:
        """Prepare for a step. Nothing waits for the device.

        Args:
            optimizer: whose step it is, with its settings.
            looking: the same, as loss scales know it: see `guard.look`.

        Returns:
            the inputs "first" and "flag" of each loss scale.
        """
        if self._settings is not None:
            self._settings.refresh(optimizer.param_groups)
        fresh: dict[Slot, torch.Tensor] = {}
        for k, scale in enumerate(self.key.scales):
            overflows = guard.look(looking, scale)
            is_first = scale.begin_step()
            if self.config.checked:
                known = self._no_overflows if overflows is None else overflows.to(self.device)
                fresh[Slot("scale", k, "flag")] = known
                fresh[Slot("scale", k, "first")] = self._firsts[is_first]
        return fresh

    def ran(self) -> None:
        """Tell autograd and the working copies that the step has run."""
        torch.autograd.graph.increment_version(self._written)
        for param, copy in self._copied:
            copy.written(param)


class HeldSettings:
    """The settings that are inputs of a step's graph, each in a 0-d FP64 tensor that is kept: the
    learning rates, and the floats of settings that were seen to change.

    Attributes:
        tensors: the tensors, by the slot of their input.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Sequence[Member],
        traces: Sequence[Trace],
        varying: frozenset[Setting],
    ) -> None:
        groups, device = optimizer.param_groups, members[0].param.device
        taking_part = {m.group for m in members if m.updated}
        self._traces, self._varying = traces, varying
        self._lrs = {g: Slot("lr", g) for g in taking_part if has_lr(groups[g])}
        self._floats = setting_floats(groups, varying)
        self._stored: dict[Slot, float] = {}  # the numbers in the tensors
        self.tensors = {
            slot: torch.zeros((), dtype=torch.float64, device=device)
            for slot in (*self._lrs.values(), *self._floats)
        }

    def refresh(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy the current settings into the tensors. Nothing waits for the device."""
        now = {slot: groups[g]["lr"] for g, slot in self._lrs.items()}
        self._floats = setting_floats(groups, self._varying)
        for slot, value in {**now, **self._floats}.items():
            if isinstance(value, torch.Tensor):
                self.tensors[slot].copy_(value)
                self._stored.pop(slot, None)
            elif self._stored.get(slot) != value:
                self.tensors[slot].fill_(value)
                self._stored[slot] = value

    def facts(self, optimizer: Optimizer) -> list[Fact]:
        """What must not change of them."""
        words = "a setting on the other side of a test"
        return [Fact(words, self._fit, optimizer)] if self._varying else []

    def _fit(self, optimizer: Optimizer) -> bool:
        """Whether the graph is right for the current floats."""
        now = setting_floats(optimizer.param_groups, self._varying)
        return now.keys() == self._floats.keys() and (
            now == self._floats or all(one.holds_for(now) for one in self._traces)
        )
