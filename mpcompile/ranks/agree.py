"""Small collectives by which ranks decide alike.

All ranks must call them, in the same order. They are called where data-parallel training is
collective anyway: in an optimizer's step, in a forward that exchanges shards, in a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


def is_distributed() -> bool:
    """Whether the process works with others: else nothing is sharded, and torch is not asked."""
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True)
class Ranks:
    """The ranks that train something together; false if there are no others.

    Attributes:
        groups: the process groups that connect them.
        device: the kind of device whose tensors the groups exchange; None without groups.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()
    device: torch.device | None = None

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __add__(self, others: Ranks) -> Ranks:
        groups = tuple(dict.fromkeys((*self.groups, *others.groups)))
        return Ranks(groups, others.device if others else self.device)

    def all_max(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over these ranks of flags or small counts: any shape, an integer
        dtype or bool. On the groups' device; without groups the tensor itself.
        """
        if not self:
            return numbers
        found = numbers.to(self.device, torch.int32, copy=True)
        for group in self.groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return found.to(numbers.dtype)

    def least(self, numbers: Sequence[float]) -> list[float]:
        """For each number, of which each rank has as many, the least that one of them has; waits
        for the device.
        """
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        for group in self.groups:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
        return [float(number) for number in found.tolist()]
