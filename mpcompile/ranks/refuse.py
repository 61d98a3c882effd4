"""Refuse what mpcompile can't train together with torch's distributed engines."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import MPCompileError
from ..torch_inside.distributed import FSDP_MARK
from ..torch_inside.private_names import Part, refuse, why_off
from . import fsdp
from .agree import is_distributed


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
        for group in fsdp.groups_in(module):
            _check_dtypes(name or type(module).__name__, group.mp_policy)
    _refuse_fsdp1(model)
    _check_whole(model)


def _refuse_fsdp1(model: nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    marked = [m for m in model.modules() if getattr(m, FSDP_MARK, False)]
    known = {m for root in fsdp.sharded_modules() for m in root.modules()} if marked else set()
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
    if split:
        for _, holder in fsdp.holders():
            if not holder.is_dtensor:  # FSDP makes a plain tensor of it
                split.pop(id(holder.sharded_param), None)
    if split:
        raise MPCompileError(
            f"{next(iter(split.values()))} is a DTensor that stays split over ranks, as by "
            "parallelize_module (tensor parallelism), and mpcompile compiles plain tensors. Shard "
            "the model with torch.distributed.fsdp.fully_shard alone, or train it with "
            "torch.compile and torch.autocast"
        )
