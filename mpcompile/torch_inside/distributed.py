"""The engines that train in several processes: DDP, FSDP2 and ZeRO-1; and DTensor.

Without torch.distributed, or without a name of these, the import still works: see
`private_names.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .private_names import Part, attribute, private

if TYPE_CHECKING:
    from torch.distributed._composable_state import _get_module_state as engine_of
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
else:
    _STATE = "torch.distributed._composable_state"
    engine_of = private(f"{_STATE}:_get_module_state", "tells a sharded module", Part.RANKS)
    _FSDP = "torch.distributed.fsdp._fully_shard"
    FSDPState = private(f"{_FSDP}._fsdp_state:FSDPState", "is FSDP's state", Part.RANKS)

engine_states: Mapping[Any, Any] = private(
    "torch.distributed._composable_state:_module_state_mapping", "lists the engines", Part.RANKS
)
"""Each module that an engine has taken charge of -> a weak reference to the engine's state."""
FSDP_MARK = "_is_fsdp_managed_module"
"""An attribute of each module below one that FSDP shards: FSDP2 and FSDP1 set it for Dynamo."""
LOCAL = "_local_tensor"
"""The attribute of a DTensor in which this rank's part lies. Unlike `to_local()` it is the same
object in each call, and takes part in no autograd graph."""

__all__ = [
    "FSDP_MARK",
    "LOCAL",
    "FSDPState",
    "active_ddp",
    "engine_of",
    "engine_states",
    "groups_of",
    "is_joined",
    "is_reducing",
    "modules_of",
    "overlaps_backward",
    "parameters_of",
    "reduces_in_python",
    "whole_of",
]

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


attribute(
    "torch.nn.parallel:DistributedDataParallel._module_parameters",
    "averages gradients over ranks",
    Part.RANKS,
)
attribute(
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._unsharded_param",
    "is the whole of a sharded parameter",
    Part.RANKS,
)
attribute(
    "torch.distributed.optim:ZeroRedundancyOptimizer._overlap_with_ddp",
    "tells if ZeRO updates inside of the backward",
    Part.RANKS,
)
