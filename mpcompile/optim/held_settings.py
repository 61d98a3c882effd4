"""Settings of param groups that a compiled step reads again each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..ir.step_config import Slot
from .fingerprint import Fact
from .members import Member, Setting, has_lr, setting_floats
from .trace import Trace

_Groups = Sequence[Mapping[str, Any]]


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
        traced: Trace,
        varying: frozenset[Setting],
    ) -> None:
        groups, device = optimizer.param_groups, members[0].param.device
        taking_part = {m.group for m in members if m.updated}
        self._traced, self._varying = traced, varying
        self._lrs = {g: Slot("lr", g) for g in taking_part if has_lr(groups[g])}
        self._floats = setting_floats(groups, varying)
        self._stored: dict[Slot, float] = {}  # the numbers in the tensors
        self.tensors = {
            slot: torch.zeros((), dtype=torch.float64, device=device)
            for slot in (*self._lrs.values(), *self._floats)
        }

    def refresh(self, groups: _Groups) -> None:
        """Copy the current settings into the tensors. Nothing waits for the device."""
        now = {slot: groups[g]["lr"] for g, slot in self._lrs.items()}
        if self._varying:
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
            now == self._floats or self._traced.holds_for(now)
        )
