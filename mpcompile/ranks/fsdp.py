"""FSDP2 (`torch.distributed.fsdp.fully_shard`): which modules and parameters it shards.

An optimizer holds the shards: DTensors, of which each rank has a part. A module's forward, and so a
compiled graph, reads whole parameters, which FSDP gathers before and frees afterwards.

Internals of torch were read in torch 2.13 and exist in 2.11, where a state has one group of
parameters, `_fsdp_param_group`, in place of a list.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# With this attribute FSDP2 (and FSDP1) mark each module below one that they shard, for Dynamo.
MARK = "_is_fsdp_managed_module"


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return dist.is_available() and _state_of(module) is not None


def engines(module: nn.Module) -> tuple[int, bool]:
    """What changes when an engine such as FSDP2 takes charge of a module, or of parts of it."""
    return len(_states_by_module()), MARK in vars(module)


def sharded_modules() -> list[nn.Module]:
    """The modules of this process on which `fully_shard` was called."""
    return [m for state in _states() for m in state._modules]


def groups_in(*modules: nn.Module) -> list[Any]:
    """The groups of parameters (`FSDPParamGroup`) that these modules' own FSDP states gather."""
    groups: dict[int, Any] = {}
    for state in map(_state_of, modules) if dist.is_available() else ():
        if state is not None:
            groups |= {id(group): group for group in _groups_of(state)}
    return list(groups.values())


@dataclass(frozen=True)
class Shard:
    """The shard of one whole parameter.

    Attributes:
        parameter: the DTensor that an optimizer holds.
        whole: the whole parameter.
        holder: FSDP's own record of it, an `FSDPParam`.
        group: FSDP's group (`FSDPParamGroup`) of parameters that travel together.
    """

    parameter: torch.Tensor
    whole: torch.Tensor
    holder: Any
    group: Any

    def is_current(self) -> Callable[[], bool]:
        """A function that tells whether FSDP still uses this DTensor, which loading a state with
        `assign=True` replaces. It keeps nothing alive.
        """
        holder, parameter = weakref.ref(self.holder), weakref.ref(self.parameter)
        return lambda: (alive := holder()) is None or alive.sharded_param is parameter()


def shards_of(parameters: Iterable[torch.Tensor]) -> list[Shard]:
    """The shards of those parameters that FSDP has gathered."""
    if not dist.is_available():
        return []
    known = {
        id(holder._unsharded_param): Shard(
            holder.sharded_param, holder._unsharded_param, holder, group
        )
        for state in _states()
        for group in _groups_of(state)
        for holder in group.fsdp_params
        if hasattr(holder, "_unsharded_param")
    }
    return [known[id(p)] for p in parameters if id(p) in known]


def holders() -> Iterator[Any]:
    """FSDP's record (`FSDPParam`) of each parameter that it shards, in the whole process."""
    for state in _states():
        for group in _groups_of(state):
            yield from group.fsdp_params


def _state_of(module: nn.Module) -> Any:
    from torch.distributed._composable_state import _get_module_state

    state = _get_module_state(module)
    return state if _is_fsdp(state) else None


@functools.cache  # each call of a compiled module asks for it
def _states_by_module() -> Mapping[Any, weakref.ref[Any]]:
    """Torch's own record of which module has which state."""
    if not dist.is_available():
        return {}
    from torch.distributed._composable_state import _module_state_mapping

    return _module_state_mapping


def _states() -> Iterator[Any]:
    """The FSDP states of the process; one state may be that of several modules."""
    alive = (ref() for ref in list(_states_by_module().values()))
    yield from dict.fromkeys(state for state in alive if _is_fsdp(state))


def _is_fsdp(state: Any) -> bool:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return isinstance(state, FSDPState)


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
