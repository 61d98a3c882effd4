"""What a step is compiled for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
        params = [member.param for member in members]
        others = (own,) if own is not None else ()
        known = [tuple(parameters.scales_of(p)) or others for p in params]
        scales = tuple(dict.fromkeys(itertools.chain.from_iterable(known)))
        stored = arriving or [*map(Stored.of, params)]
        layouts = [layout_of(p) if connected and connected.countable else None for p in params]
        gradients = tuple(
            Gradient(how.dtype, tuple(map(scales.index, some)), layout.replicas if layout else 1)
            for how, some, layout in zip(stored, known, layouts, strict=True)
        )
        held = tuple(next(iter(copies.copies_of(p).values()), None) for p in params)
        strides = tuple(how.strides for how in stored)
        who = tuple((id(m.param), m.group, m.updated) for m in members)
        scaled = tuple(tuple(map(id, some)) for some in known)
        rules = tuple((id(scale), scale.rule) for scale in scales)
        facts = (who, gradients, scaled, tuple(map(id, held)), strides, rules, connected)
        return cls(facts, tuple(members), scales, gradients, held, strides, connected)

    @property
    def checked(self) -> bool:
        """Whether a gradient that is not finite skips the step."""
        return any(scale.active for scale in self.scales)


class Stored(NamedTuple):
    """How a gradient is stored: its dtype and its strides."""

    dtype: torch.dtype
    strides: tuple[int, ...]

    @classmethod
    def of(cls, param: torch.Tensor) -> Stored:
        """How the gradient of a parameter, which has one, is stored."""
        grad = local(param.grad)  # type: ignore[arg-type]
        return cls(grad.dtype, grad.stride())
