"""Small collectives by which ranks decide alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_max(tensor: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The largest values on all ranks of these groups, in place."""
    for group in groups:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor
