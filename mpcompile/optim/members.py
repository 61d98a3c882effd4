"""The parameters that take part in a step."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.optim import Optimizer

from ..errors import MPCompileError
from ..ranks.shards import local, place_gradient
from ..ranks.zero import is_zero, partition_of
from .inputs import Member


def members_of(optimizer: Optimizer, *, sharded: bool) -> tuple[list[Member], list[Hashable]]:
    """The parameters that have a gradient, and what tells this step from others: which they are,
    and how their gradients are stored.

    Args:
        sharded: whether some parameters may be DTensors. Their gradients are then placed like them.

    Raises:
        MPCompileError: a gradient is sparse, or lies on other ranks than its parameter.
    """
    own: set[int] | None = None  # all
    if is_zero(optimizer):
        own = {id(p) for group in partition_of(optimizer).param_groups for p in group["params"]}
    members: list[Member] = []
    facts: list[Hashable] = []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            grad = param.grad
            if grad is None or param.numel() == 0:
                continue
            if sharded:
                place_gradient(param)
                grad = local(param.grad)
            if grad.layout is not torch.strided:
                raise MPCompileError(
                    f"MPOptimizer: a gradient of shape {tuple(param.shape)} is sparse; make it "
                    "dense (nn.Embedding(sparse=False)), or use the plain torch.optim optimizer"
                )
            members.append(Member(index, param, own is None or id(param) in own))
            facts.append((index, id(param), grad.dtype, grad.stride()))
    return members, facts
