"""Small collectives by which ranks decide alike.

All ranks of a group must call them, in the same order. They are called where data-parallel training
is collective anyway: in an optimizer's step, or in a forward that exchanges shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


def all_max(
    tensor: torch.Tensor, groups: Iterable[dist.ProcessGroup | None]
) -> torch.Tensor:  # fmt: skip
    """The elementwise maximum over the ranks of each group in turn, written into `tensor` (any
    shape, a dtype that the backend reduces), which is returned. None is the default group.
    """
    for group in groups:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor


def least(
    numbers: Sequence[float], groups: Iterable[dist.ProcessGroup | None], device: torch.device
) -> list[float]:
    """For each number, the least that a rank of these groups has; waits for the device.

    Args:
        numbers: as many on each rank.
        device: one that the groups' backend reduces on.
    """
    found = torch.tensor(numbers, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    return [float(number) for number in found.tolist()]
