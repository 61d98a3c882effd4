"""Parameters that have no gradient in some steps, in a step that is compiled for all of these.

    gradient    zeros, where a parameter has none: one buffer for all of them
    absent0     says so; the step then leaves the parameter and its state as they are
    state       that of a parameter which never had a gradient waits here: torch makes it with the
                first one, and so it isn't in the optimizer's own state before

So one program does for every set of missing gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..ir.step import Slot
from ..ranks.shards import local
from ..torch_inside.autograd import keep_versions
from ..torch_inside.tensors import copy_all
from .first_state import initialise_state
from .inputs import Member
from .key import StepKey


class Absent:
    """The parameters of a step, of which some may have no gradient.

    Args:
        key: of the step, over all of these parameters.
        waiting: the state of those that never had a gradient. The step is compiled for its tensors.

    Attributes:
        held: the input of the graph that says so of each parameter, by slot.
    """

    def __init__(self, key: StepKey, waiting: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        self.key, self.members = key, key.members
        self.waiting = dict(waiting)
        self.now: Sequence[bool] = [False] * len(key.members)
        device = local(key.members[0].param).device
        self._flags = torch.zeros(len(key.members), dtype=torch.bool, device=device).unbind()
        self._values = [torch.tensor(flag, device=device) for flag in (False, True)]
        self._zeros: dict[torch.dtype, torch.Tensor] = {}
        self.held = {Slot("absent", i): flag for i, flag in enumerate(self._flags)}

    def covers(self, key: StepKey, optimizer: Optimizer) -> bool:
        """Whether the step is right where just the parameters of this key have gradients."""
        groups = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        return (
            self.key.covers(key)
            and all(groups.get(id(m.param)) == m.group for m in self.members if m.updated)
            and not any(optimizer.state.get(p) for p in self.waiting)
        )

    def look(self) -> frozenset[int]:
        """See which parameters have no gradient now, and tell the step. Returns their indices."""
        now = [member.param.grad is None for member in self.members]
        if now != self.now:
            copy_all(self._flags, [self._values[absent] for absent in now])
            self.now = now
        return frozenset(i for i, absent in enumerate(now) if absent)

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, in the strides that the step is compiled for."""
        return [self._gradient(i, member) for i, member in enumerate(self.members)]

    def _gradient(self, i: int, member: Member) -> torch.Tensor:
        strides = self.key.strides[i]
        shape = local(member.param).shape
        if member.param.grad is None:
            return self._zeros_of(self.key.gradients[i].dtype, shape, strides)
        grad = local(member.param.grad)
        if grad.stride() == strides:
            return grad
        laid = torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device)
        return laid.copy_(grad)

    def _zeros_of(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        size = 1 + sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True))
        if dtype not in self._zeros or self._zeros[dtype].numel() < size:
            self._zeros[dtype] = torch.zeros(size, dtype=dtype, device=self._flags[0].device)
        return self._zeros[dtype].as_strided(shape, strides)

    def take_in(self, optimizer: Optimizer) -> list[torch.Tensor] | None:
        """Give the state that waits to parameters that have got their first gradient: with the
        numbers that it starts from now, say at another learning rate than before.

        Returns:
            These parameters; or None if this state isn't stored like the one that waited.
        """
        firsts = [p for p in self.waiting if p.grad is not None]
        if not firsts:
            return firsts
        present = [m for m in self.members if m.param.grad is not None]
        initialise_state(optimizer, present)
        for param in firsts:
            made, kept = optimizer.state.get(param, {}), self.waiting.pop(param)
            if {k: _stored(v) for k, v in made.items()} != {k: _stored(v) for k, v in kept.items()}:
                return None
            for key, value in made.items():
                if isinstance(value, torch.Tensor):
                    made[key] = kept[key].copy_(value)
        return firsts

    @contextlib.contextmanager
    def left_alone(self, others: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """In this context, a write to a parameter without a gradient is none to autograd: it writes
        what is there.

        Args:
            others: a further tensor that the step writes for each parameter, or None.
        """
        tensors = [
            t
            for absent, member, other in zip(self.now, self.members, others, strict=True)
            if absent
            for t in (local(member.param), other)
            if t is not None
        ]
        with keep_versions(tuple(tensors)):
            yield


def _stored(value: Any) -> object:
    """What must not change of an entry of the state: of a tensor, how it is stored."""
    if isinstance(value, torch.Tensor):
        held = local(value)
        return value.dtype, value.device, tuple(held.shape), held.stride()
    return value
