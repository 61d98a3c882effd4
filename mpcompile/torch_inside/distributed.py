"""The engines that train in several processes: DDP, FSDP2 and ZeRO-1; and DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .names import FSDPState

FSDP_MARK = "_is_fsdp_managed_module"
"""An attribute of each module below one that FSDP shards: FSDP2 and FSDP1 set it for Dynamo."""
LOCAL = "_local_tensor"
"""The attribute of a DTensor in which this rank's part lies. Unlike `to_local()` it is the same
object in each call, and takes part in no autograd graph."""

# -- DDP -------------------------------------------------------------------------------------------


def active_ddp() -> nn.parallel.DistributedDataParallel | None:
    """The DDP whose forward is running, or None."""
    return nn.parallel.DistributedDataParallel._active_ddp_module


def reduces_in_python(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether gradients are averaged without the reducer in C++."""
    return ddp._use_python_reducer


def is_joined(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether its forward runs in `join()`."""
    return bool(ddp._join_config.enable)


def is_reducing(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether a reduction has begun and not ended: some gradients are still to be averaged."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def parameters_of(ddp: nn.parallel.DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that it looks after: those that it was not told to ignore."""
    return ddp._module_parameters


# -- FSDP2 -----------------------------------------------------------------------------------------


def modules_of(state: FSDPState) -> tuple[nn.Module, ...]:
    """The modules on which one `fully_shard` was called."""
    return state._modules


def groups_of(state: FSDPState) -> list[Any]:
    """The groups of parameters (`FSDPParamGroup`) of a state."""
    return list(state._fsdp_param_groups)


def whole_of(holder: Any) -> torch.Tensor | None:
    """The whole parameter of a record (`FSDPParam`); None: it was never gathered."""
    return getattr(holder, "_unsharded_param", None)


# -- ZeRO-1 ----------------------------------------------------------------------------------------


def overlaps_backward(optimizer: Any) -> bool:
    """Whether a ZeroRedundancyOptimizer updates inside of the backward (`overlap_with_ddp`)."""
    return bool(optimizer._overlap_with_ddp)
