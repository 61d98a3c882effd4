"""FSDP2 (`torch.distributed.fsdp.fully_shard`): which modules and parameters it shards.

An optimizer holds the shards: DTensors, of which each rank has a part. A module's forward, and so a
compiled graph, reads whole parameters, which FSDP gathers before and frees afterwards.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..torch_inside.distributed import FSDP_MARK, groups_of, modules_of, whole_of
from ..torch_inside.names import FSDPState, engine_of, engine_states
from ..torch_inside.private_names import MissingInTorch
from ..torch_inside.tensors import marks_match, marks_of
from .agree import is_distributed


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return _state_of(module) is not None


def engines(module: nn.Module) -> tuple[int, bool]:
    """What changes when an engine such as FSDP2 takes charge of a module, or of parts of it."""
    return len(_engines()), FSDP_MARK in vars(module)


def sharded_modules() -> list[nn.Module]:
    """The modules of this process on which `fully_shard` was called."""
    return [m for state in _states() for m in modules_of(state)]


def groups_in(module: nn.Module) -> list[Any]:
    """The groups of parameters (`FSDPParamGroup`) that the module's own FSDP state gathers."""
    state = _state_of(module)
    return [] if state is None else groups_of(state)


@dataclass(frozen=True)
class Shard:
    """The shard of one whole parameter.

    Attributes:
        parameter: the DTensor that an optimizer holds.
        holder: FSDP's own record of it, an `FSDPParam`.
        group: FSDP's group (`FSDPParamGroup`) of parameters that travel together.
    """

    parameter: torch.Tensor
    holder: Any
    group: Any

    def is_current(self) -> Callable[[], bool]:
        """A function that tells whether FSDP still uses this DTensor, which loading a state with
        `assign=True` replaces. It keeps nothing alive.
        """
        holder, marks = weakref.ref(self.holder), marks_of([self.parameter])
        return lambda: (alive := holder()) is None or marks_match(marks, [alive.sharded_param])


def shards_of(parameters: Iterable[torch.Tensor]) -> list[Shard]:
    """The shards of those parameters that FSDP has gathered."""
    known = {
        id(whole): Shard(holder.sharded_param, holder, group)
        for group, holder in holders()
        if (whole := whole_of(holder)) is not None
    }
    return [known[id(p)] for p in parameters if id(p) in known]


def holders() -> Iterator[tuple[Any, Any]]:
    """FSDP's record (`FSDPParam`) of each parameter that it shards, in the whole process, after the
    group that it is in.
    """
    for state in _states():
        for group in groups_of(state):
            yield from ((group, holder) for holder in group.fsdp_params)


@functools.cache  # each call of a compiled module asks for it
def _engines() -> Mapping[Any, Any]:
    """Torch's record of engines; empty if this torch has none, which raises where it is needed."""
    try:
        len(engine_states)
    except MissingInTorch:
        return {}
    return engine_states


def _state_of(module: nn.Module) -> Any:
    state = engine_of(module) if is_distributed() else None
    return state if state is not None and isinstance(state, FSDPState) else None


def _states() -> Iterator[Any]:
    """The FSDP states of the process; one state may be that of several modules."""
    alive = [ref() for ref in list(engine_states.values())] if is_distributed() else []
    yield from dict.fromkeys(state for state in alive if isinstance(state, FSDPState))
