"""What a step is compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..ir.step_config import Gradient
from ..ranks.shards import Connected, layout_of, local
from ..scaling import copies, parameters
from ..scaling.copies import WorkingCopy
from ..scaling.loss_scale import LossScale
from .members import Member


@dataclass(frozen=True)
class StepKey:
    """What a step is compiled for: which parameters have a gradient, and how it is stored.

    Attributes:
        facts: what keys are compared by; all else follows from it.
        scales: the loss scales of the members' models.
        connected: the ranks that each hold a part of these parameters, or None.
        gradients, copies, strides: one entry for each member; the strides are those of its gradient
            as this rank holds it.
    """

    facts: tuple[Any, ...]
    members: tuple[Member, ...] = field(compare=False)
    scales: tuple[LossScale, ...] = field(compare=False)
    gradients: tuple[Gradient, ...] = field(compare=False)
    copies: tuple[WorkingCopy | None, ...] = field(compare=False)
    strides: tuple[tuple[int, ...], ...] = field(compare=False)
    connected: Connected | None = field(compare=False)

    @classmethod
    def of(
        cls,
        members: Sequence[Member],
        own: LossScale | None,
        connected: Connected | None = None,
        *,
        arriving: Sequence[Stored] = (),
    ) -> StepKey:
        """The key of a step over these members, which have gradients or will be given those that
        are `arriving`; `own` scales parameters of no scaled model.
        """
        scales: list[LossScale] = []
        gradients: list[Gradient] = []
        held: list[WorkingCopy | None] = []
        facts: list[Any] = []
        strides: list[tuple[int, ...]] = []
        others = (own,) if own is not None else ()
        for i, member in enumerate(members):
            param = member.param
            copy = _copy_of(param)
            known = parameters.scales_of(param) or others
            stored = arriving[i] if arriving else _stored(param)
            layout = layout_of(param) if connected and connected.countable else None
            gradient = Gradient(
                stored.dtype,
                tuple(_index(scale, scales) for scale in known),
                layout.replicas if layout is not None else 1,
            )
            gradients.append(gradient)
            held.append(copy)
            strides.append(stored.strides)
            scaled = tuple(map(id, known))
            how = (member.group, member.updated, stored.dtype, gradient.replicas, scaled)
            facts.append((id(param), how, None if copy is None else id(copy), stored.strides))
        return cls(
            (tuple(facts), rules_of(scales), connected),
            tuple(members),
            tuple(scales),
            tuple(gradients),
            tuple(held),
            tuple(strides),
            connected,
        )

    @property
    def checked(self) -> bool:
        """Whether a gradient that is not finite skips the step."""
        return any(scale.active for scale in self.scales)


def _index(scale: LossScale, scales: list[LossScale]) -> int:
    """Which of the scales it is; it is added if it is none of them."""
    for k, known in enumerate(scales):
        if known is scale:
            return k
    scales.append(scale)
    return len(scales) - 1


def _copy_of(param: torch.Tensor) -> WorkingCopy | None:
    return next(iter(copies.copies_of(param).values()), None)


class Stored(NamedTuple):
    """How a gradient is stored: its dtype and its strides."""

    dtype: torch.dtype
    strides: tuple[int, ...]


def _stored(param: torch.Tensor) -> Stored:
    """How the gradient of a parameter is stored."""
    grad = param.grad
    assert grad is not None
    return Stored(grad.dtype, local(grad).stride())


def rules_of(scales: Iterable[LossScale]) -> tuple[Any, ...]:
    """The facts about these scales that a step is compiled for."""
    return tuple((id(s), s.rule) for s in scales)
