"""What a step is compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ..ir.step import Gradient
from ..ranks.shards import Connected, layout_of, local
from ..state import copies, parameters
from ..state.loss_scale import LossScale
from ..state.low_gradients import LowGradient, on_one_scale
from .inputs import Member
from .members import pattern_of

if TYPE_CHECKING:
    from .step import CompiledStep


@dataclass(frozen=True)
class StepKey:
    """What a step is compiled for: which parameters have a gradient, and how it is stored.

    Attributes:
        facts: what keys are compared by; all else follows from it.
        members: the parameters of the step.
        scales: the loss scales of their models.
        connected: the ranks that each hold a part of these parameters, or None.
        gradients, copies: one entry for each member.
    """

    facts: tuple[Any, ...]
    members: tuple[Member, ...] = field(compare=False)
    scales: tuple[LossScale, ...] = field(compare=False)
    gradients: tuple[Gradient, ...] = field(compare=False)
    copies: tuple[copies.WorkingCopy | None, ...] = field(compare=False)
    connected: Connected | None = field(compare=False, default=None)

    @classmethod
    def of(
        cls, members: Sequence[Member], own: LossScale, connected: Connected | None = None
    ) -> StepKey:
        """The key of a step over these members; `own` scales parameters of no scaled model."""
        scales: list[LossScale] = []
        gradients: list[Gradient] = []
        held: list[copies.WorkingCopy | None] = []
        facts: list[Any] = []

        def index(scale: LossScale) -> int:
            for k, known in enumerate(scales):
                if known is scale:
                    return k
            scales.append(scale)
            return len(scales) - 1

        for member in members:
            grad = member.param.grad
            assert grad is not None
            copy = next(iter(copies.copies_of(member.param).values()), None)
            known = tuple(index(s) for s in parameters.scales_of(member.param) or (own,))
            stored = copy.gradient.scale if copy and copy.gradient.is_scaled(grad) else None
            by = index(stored) if stored is not None and stored.active else None
            layout = layout_of(member.param) if connected and connected.countable else None
            replicas = layout.replicas if layout is not None else 1
            gradients.append(Gradient(grad.dtype, known, by, replicas))
            held.append(copy)
            who = member.group, id(member.param), member.updated
            facts.append((*who, grad.dtype, local(grad).stride(), known, by, replicas, id(copy)))
        return cls(
            (*facts, rules_of(scales), connected),
            tuple(members),
            tuple(scales),
            tuple(gradients),
            tuple(held),
            connected,
        )

    def __hash__(self) -> int:
        return hash(self.facts)

    @cached_property
    def scaled(self) -> dict[int, list[tuple[LowGradient, torch.Tensor]]]:
        """For each loss scale (by index): whose gradients are stored scaled by it."""
        found: dict[int, list[tuple[LowGradient, torch.Tensor]]] = {}
        for member, copy, gradient in zip(self.members, self.copies, self.gradients, strict=True):
            if copy is not None and (k := gradient.scaled_by) is not None:
                found.setdefault(k, []).append((copy.gradient, member.param))
        return found

    @property
    def checked(self) -> bool:
        """Whether a gradient that is not finite skips the step."""
        return any(scale.active for scale in self.scales)

    def multipliers(self) -> dict[int, torch.Tensor]:
        """The numbers that the scaled gradients are multiplied by now, for each of their loss
        scales (by index): 0-d FP32.
        """
        return {
            k: on_one_scale([(low, param.grad) for low, param in scaled])  # type: ignore[misc]
            for k, scaled in self.scaled.items()
        }


class LastKey:
    """The key of the last step, and what it was made from.

    Args:
        key: the key.
        optimizer: whose step it is.

    Attributes:
        step: what was compiled for it, once that is known: to look a key up takes a hash of it all.
    """

    def __init__(self, key: StepKey, optimizer: Optimizer) -> None:
        self.key = key
        self.step: CompiledStep | None = None
        self._pattern = pattern_of(optimizer, sharded=key.connected is not None)
        self._rules, self._changes = rules_of(key.scales), parameters.changes()

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether the next step has this key, too."""
        return (
            self._changes == parameters.changes()
            and self._rules == rules_of(self.key.scales)
            and self._pattern.holds(optimizer)
        )


def rules_of(scales: Iterable[LossScale]) -> tuple[Any, ...]:
    """The facts about these scales that a step is compiled for."""
    return tuple((id(s), s.rule) for s in scales)
