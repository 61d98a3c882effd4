"""Small gradients are copied to memory that is kept, alike ones one behind the other.

    p0.grad, p1.grad, p2.grad    --one copy-->    [grads0: grad0 | grad1 | grad2]

A backward makes new gradients each time. Where they are small, one copy of all of them costs less
than to hand each to the pieces that read it, and one norm of the vector less than a norm of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ir.fakes import like
from ..ir.step import Gradient, Slot
from ..ranks.shards import is_sharded, local
from ..torch_inside.fakes import FakeTensorMode
from ..torch_inside.tensors import copy_all
from .inputs import Member

_MOST = 1 << 12  # elements: a larger copy takes longer than what it saves


class Gathered:
    """Memory for the small gradients of a step.

    Args:
        members: the parameters of the step.
        gradients: how the gradient of each is stored.
        strides: those of each gradient; default: as they are now.

    Attributes:
        groups: the members (by index) whose gradients lie one behind the other: those alike.
        held: the vector of each group, and in it the gradient of each member, by slot.
    """

    def __init__(
        self,
        members: Sequence[Member],
        gradients: Sequence[Gradient],
        strides: Sequence[Sequence[int]] | None = None,
    ) -> None:
        strides = strides or [_gradient(member).stride() for member in members]
        with FakeTensorMode():
            fakes = [
                like(local(member.param), dtype=gradient.dtype, strides=laid)
                for member, gradient, laid in zip(members, gradients, strides, strict=True)
            ]
        alike: dict[Gradient, list[int]] = {}
        for i, (fake, gradient) in enumerate(zip(fakes, gradients, strict=True)):
            if _is_small(fake):
                alike.setdefault(gradient, []).append(i)
        self.groups = tuple(tuple(group) for group in alike.values() if len(group) > 1)
        self.held: dict[Slot, torch.Tensor] = {}
        self._params = [members[i].param for group in self.groups for i in group]
        self._indices = [i for group in self.groups for i in group]
        self._sharded = any(map(is_sharded, self._params))
        self._places: list[torch.Tensor] = []
        for k, group in enumerate(self.groups):
            found = [fakes[i] for i in group]
            size, device = sum(g.numel() for g in found), found[0].device
            vector = torch.empty(size, dtype=found[0].dtype, device=device)
            self.held[Slot("grads", k)] = vector
            offset = 0
            for i, grad in zip(group, found, strict=True):
                place = vector.as_strided(grad.shape, grad.stride(), offset)
                self.held[Slot("grad", i)] = place
                self._places.append(place)
                offset += grad.numel()

    def fill(self, gradients: Sequence[torch.Tensor] | None = None) -> None:
        """Copy these gradients of all members, or by default their own, under no_grad."""
        if not self._places:
            return
        if gradients is not None:
            copy_all(self._places, [gradients[i] for i in self._indices])
        else:
            # members have gradients
            grads: list[torch.Tensor] = [param.grad for param in self._params]  # type: ignore[misc]
            copy_all(self._places, [*map(local, grads)] if self._sharded else grads)


def _gradient(member: Member) -> torch.Tensor:
    assert member.param.grad is not None
    return local(member.param.grad)


def _is_small(gradient: torch.Tensor) -> bool:
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense.default(gradient)
    return dense and 0 < gradient.numel() <= _MOST
