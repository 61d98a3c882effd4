"""What a graph is planned for: the facts of a device, asked of the device or read off a data sheet.

    target = target_of(torch.device("cuda"), None)      # the GPU at hand, dtype="auto"
    target = target_for(gpu("t4"), torch.float16)       # one that isn't there

A plan depends on nothing else of the device. Where tensors lie while a plan is made is another
question, which no pass asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from .. import profile
from ..devices.facts import (
    AUTO,
    TensorCores,
    auto_dtype,
    cuda_matrix_units,
    cuda_tensor_cores,
    has_units,
    matrix_units,
    multiply_in,
)
from ..devices.gpus import GPU
from ..rules import kernels

__all__ = ["Target", "target_for", "target_of"]


@dataclass(frozen=True)
class Target:
    """One device under one low dtype. The attributes are those of `policy.Config`.

    Attributes:
        device: as plans name it.
        low: torch.float16 or torch.bfloat16.
        profile: how long products take there, or None.
        promised: whether a product that the profile knows nothing of may be taken to be faster low.
        cores: what its matrix units ask of dimensions.
        has_kernel: `(node) -> bool`: whether the node's operator runs in `low` there.
    """

    device: torch.device
    low: torch.dtype
    profile: profile.Profile | None
    promised: bool
    cores: TensorCores
    has_kernel: Callable[[fx.Node], bool]


def target_of(device: torch.device, dtype: torch.dtype | None) -> Target:
    """A device of this machine.

    Args:
        dtype: what was asked for; None: "auto".

    Raises:
        MPCompileError: the device type is not supported; `MPCOMPILE_PROFILE` names no profile.
    """
    auto = auto_dtype(device)[0]
    low = dtype or auto
    units = has_units(device, low)
    return Target(
        device=device,
        low=low,
        profile=profile.load(device) if _for_speed(dtype, auto, units) else None,
        promised=dtype is not None or units,
        cores=matrix_units(device),
        has_kernel=lambda node: kernels.has_kernel(node, low, device),
    )


def target_for(gpu: GPU, dtype: torch.dtype | None) -> Target:
    """A GPU known by its data sheet. It is taken to have a kernel for every operator.

    Args:
        dtype: what was asked for; None: "auto".

    Raises:
        MPCompileError: `MPCOMPILE_PROFILE` names no profile.
    """
    auto = AUTO["cuda"]
    low = dtype or auto
    units = multiply_in(cuda_tensor_cores(gpu.capability, gpu.name), low)
    return Target(
        device=torch.device("cuda", 0),
        low=low,
        profile=profile.load_for(gpu) if _for_speed(dtype, auto, units) else None,
        promised=dtype is not None or units,
        cores=cuda_matrix_units(gpu.capability),
        has_kernel=lambda node: True,
    )


def _for_speed(dtype: torch.dtype | None, auto: torch.dtype, units: bool) -> bool:
    """Whether the profile decides which products are worth it: not where one asked for a dtype that
    is slow. FP16 on a CPU, say: one wants to see what it does to the numbers.
    """
    return dtype is None or (dtype is auto and units)
