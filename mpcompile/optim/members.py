"""The parameters that take part in a step."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from ..errors import MPCompileError
from ..ranks.shards import local, place_gradient
from ..ranks.zero import is_zero, partition_of
from .inputs import Member


def members_of(optimizer: Optimizer, *, sharded: bool) -> list[Member]:
    """The parameters that have a gradient.

    Args:
        sharded: whether some parameters may be DTensors. Their gradients are then placed like them.

    Raises:
        MPCompileError: a gradient is sparse, or lies on other ranks than its parameter.
    """
    own = _own(optimizer)
    members: list[Member] = []
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
    return members


def all_members_of(optimizer: Optimizer, *, sharded: bool) -> list[Member]:
    """The same, and those that may get a gradient."""
    present = {id(m.param): m for m in members_of(optimizer, sharded=sharded)}
    own = _own(optimizer)
    return [
        present.get(id(param)) or Member(index, param, own is None or id(param) in own)
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if id(param) in present
        or (param.grad is None and param.requires_grad and param.numel() > 0)
    ]


def _own(optimizer: Optimizer) -> set[int] | None:
    """The parameters (by `id`) that this process updates; None: all."""
    if not is_zero(optimizer):
        return None
    return {id(p) for group in partition_of(optimizer).param_groups for p in group["params"]}
