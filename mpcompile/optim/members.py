"""The parameters that take part in a step."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.optim import Optimizer

from ..errors import MPCompileError
from ..ranks.shards import local, place_gradient
from ..ranks.zero import is_zero, partition_of

Found = tuple[int, torch.Tensor, bool]  # the arguments of a Member


def members_of(optimizer: Optimizer, *, sharded: bool) -> tuple[list[Found], list[Hashable]]:
    """The parameters that have a gradient, and what tells this step from others: which they are,
    and how their gradients are stored. Most steps are like the one before, and need no Members.

    Args:
        sharded: whether some parameters may be DTensors. Their gradients are then placed like them.

    Raises:
        MPCompileError: a gradient is sparse, or lies on other ranks than its parameter.
    """
    own: set[int] | None = None  # all
    if is_zero(optimizer):
        own = {id(p) for group in partition_of(optimizer).param_groups for p in group["params"]}
    found: list[Found] = []
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
            found.append((index, param, own is None or id(param) in own))
            facts.append((index, id(param), grad.dtype, grad.stride()))
    return found, facts
