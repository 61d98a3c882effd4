"""FSDP2 (`torch.distributed.fsdp.fully_shard`): which modules and parameters it shards.

An optimizer holds the shards: DTensors, of which each rank has a part. A module's forward, and so a
compiled graph, reads whole parameters, which FSDP gathers before and frees afterwards.

Other engines that shard are refused: FSDP1, tensor parallelism, dtypes of FSDP2's own.
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

from ..errors import MPCompileError
from ..torch_inside.distributed import FSDP_MARK, groups_of, modules_of, whole_of
from ..torch_inside.names import FSDPState, engine_of, engine_states
from ..torch_inside.private_names import MissingInTorch, Part, refuse, why_off
from ..torch_inside.tensors import marks_match, marks_of
from .shards import is_distributed


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return _state_of(module) is not None


def engines(module: nn.Module) -> tuple[int, bool]:
    """What changes when an engine such as FSDP2 takes charge of a module, or of parts of it."""
    return len(_engines()), FSDP_MARK in vars(module)


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
        for group, holder in _holders()
        if (whole := whole_of(holder)) is not None
    }
    return [known[id(p)] for p in parameters if id(p) in known]


def _holders() -> Iterator[tuple[Any, Any]]:
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


# -- what is refused -------------------------------------------------------------------------------


def check_ranks() -> None:
    """Refuse to compile for several processes on a torch where that is known to be wrong.

    Raises:
        MPCompileError: this process is in a group; the message says what is wrong.
    """
    if is_distributed():
        instead = "train in one process, or without mpcompile"
        refuse(Part.RANKS, "mpcompile for the processes of a group", instead)


def check_engines(model: nn.Module) -> None:
    """Refuse a model whose engine mpcompile can't work with.

    Raises:
        MPCompileError: the model is sharded by FSDP1 or by tensor parallelism, or FSDP2 was given
            dtypes of its own.
    """
    check_ranks()
    if not dist.is_available() or why_off(Part.RANKS) is not None:  # then nothing is split
        return
    for name, module in model.named_modules():
        state = _state_of(module)
        for group in groups_of(state) if state is not None else ():
            _check_dtypes(name or type(module).__name__, group.mp_policy)
    _refuse_fsdp1(model)
    _check_whole(model)


def _refuse_fsdp1(model: nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    marked = [m for m in model.modules() if getattr(m, FSDP_MARK, False)]
    roots = [m for state in _states() for m in modules_of(state)] if marked else []
    known = {m for root in roots for m in root.modules()}
    is_fsdp1 = any(isinstance(m, FullyShardedDataParallel) for m in model.modules())
    if is_fsdp1 or not known.issuperset(marked):
        raise MPCompileError(
            "mpcompile can't train under FullyShardedDataParallel (FSDP1), whose ranks would not "
            "skip the same steps. Use torch.distributed.fsdp.fully_shard(model) (FSDP2)"
        )


def _check_dtypes(name: str, policy: Any) -> None:
    for field in ("param_dtype", "output_dtype"):
        if (dtype := getattr(policy, field)) not in (None, torch.float32):
            raise MPCompileError(
                f"fully_shard({name}, mp_policy=MixedPrecisionPolicy({field}={dtype})): mpcompile "
                f"chooses the dtypes that a module computes in. Leave {field} out, or use "
                "reduce_dtype, in which gradients are reduced"
            )


def _check_whole(model: nn.Module) -> None:
    """Refuse parameters that stay split over ranks while a module's forward uses them."""
    from torch.distributed.tensor import DTensor

    split = {id(p): name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    for _, holder in _holders() if split else ():
        if not holder.is_dtensor:  # FSDP makes a plain tensor of it
            split.pop(id(holder.sharded_param), None)
    if split:
        raise MPCompileError(
            f"{next(iter(split.values()))} is a DTensor that stays split over ranks, as by "
            "parallelize_module (tensor parallelism), and mpcompile compiles plain tensors. Shard "
            "the model with torch.distributed.fsdp.fully_shard alone, or train it with "
            "torch.compile and torch.autocast"
        )
