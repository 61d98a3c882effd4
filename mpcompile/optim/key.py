"""What a step is compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..ir.step import Gradient
from ..ranks.shards import Connected, layout_of, local
from ..scaling import copies, parameters
from ..scaling.copies import WorkingCopy
from ..scaling.loss_scale import LossScale
from ..torch_inside.tensors import make_contiguous_strides_for
from .inputs import Member


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
        usual: tuple[LossScale, ...] = (),
        arriving: Sequence[Stored] = (),
    ) -> StepKey:
        """The key of a step over these members; `own` scales parameters of no scaled model. What a
        member without a gradient has is guessed: as far as nothing is known of the next one, it has
        what a parameter of its shape has, or all of the `usual` loss scales. Or it is known how the
        gradient of each is to arrive.
        """
        scales: list[LossScale] = []
        gradients: list[Gradient] = []
        held: list[WorkingCopy | None] = []
        facts: list[Any] = []
        strides: list[tuple[int, ...]] = []
        others = (own,) if own is not None else ()
        alike = {
            m.param.shape: parameters.scales_of(m.param) or others
            for m in (reversed(members) if usual else ())
            if m.param.grad is not None
        }
        for i, member in enumerate(members):
            param, grad = member.param, member.param.grad
            copy = _copy_of(param)
            guessed = alike.get(param.shape, usual) if grad is None else ()
            known = parameters.scales_of(param) or guessed or others
            stored = arriving[i] if arriving else _stored(param, copy)
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

    def covers(self, other: StepKey) -> bool:
        """Whether a step for this key is right for another one, whose members are some of these, if
        gradients are brought to the strides of this one. (A copy that this one doesn't know isn't
        written by the step, and so the next forward casts it anew.)
        """
        mine = self._by_member
        return set(rules_of(self.scales)) == set(rules_of(other.scales)) and all(
            who in mine and how == mine[who][0] and mine[who][1] in (None, copy)
            for who, (how, copy) in other._by_member.items()
        )

    @cached_property
    def _by_member(self) -> dict[int, tuple[tuple[Any, ...], int | None]]:
        """What is known of each member, by the parameter's `id`: how its gradient is stored, and
        its copy, by `id`.
        """
        return {who: (how, copy) for who, how, copy, _ in self.facts[0]}


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


def _stored(param: torch.Tensor, copy: WorkingCopy | None) -> Stored:
    """How the gradient of a parameter is stored; where it has none, how the next one will be."""
    grad = param.grad
    if grad is not None:
        return Stored(grad.dtype, local(grad).stride())
    held = local(param)
    # Autograd stores it as the parameter lies, if that is dense.
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(held)
    strides = held.stride() if dense else make_contiguous_strides_for(held.shape)
    low = held.dtype if copy is None else copy.stored.dtype
    return Stored(param.grad_dtype or low, strides)


def rules_of(scales: Iterable[LossScale]) -> tuple[Any, ...]:
    """The facts about these scales that a step is compiled for."""
    return tuple((id(s), s.rule) for s in scales)
