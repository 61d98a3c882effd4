"""ZeRO-1 (`torch.distributed.optim.ZeroRedundancyOptimizer`): each rank updates some parameters.

It holds all parameters, and in `optim` an optimizer of the user's class over this rank's partition
of them. Its step brings the settings of the param groups into that one, steps it, and broadcasts
each rank's partition to the others (read in torch 2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ..torch_inside.replace import Spot, put

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero(optimizer: Optimizer) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def partition_of(optimizer: Any) -> Optimizer:
    """The optimizer over this rank's partition; for any other optimizer, that itself. The indices
    of param groups are the same in both.
    """
    part: Optimizer = optimizer.optim if is_zero(optimizer) else optimizer
    return part


def step_with(
    optimizer: Any, local_step: Callable[[], None], whole_step: Callable[[Any], Any]
) -> None:
    """Do a step of a ZeroRedundancyOptimizer, in which `local_step` updates this rank's partition.

    Args:
        whole_step: `ZeroRedundancyOptimizer.step` itself, without torch's hooks around it.
    """
    undo = put(Spot(vars(optimizer.optim), "step"), lambda *args, **kwargs: local_step())
    try:
        whole_step(optimizer)
    finally:
        undo()
    # What was received was written without autograd's knowledge: into `.data`, or into a bucket.
    own = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
    everyone = (p for group in optimizer.param_groups for p in group["params"])
    torch.autograd.graph.increment_version([p for p in everyone if id(p) not in own])
