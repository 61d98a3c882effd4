"""What a graph is planned for: the facts of a device, asked of the device or read off a data sheet.

    target = target_of(torch.device("cuda"), None)              # the GPU at hand, dtype="auto"
    target = target_for(AbsentGPU(gpu("t4")), torch.float16)    # one that isn't there

A plan depends on nothing else of the device. Where tensors lie while a plan is made is another
question, which no pass asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from .. import profile
from ..devices.capabilities import Capabilities
from ..devices.registry import capabilities
from ..devices.tensor_cores import TensorCores
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
    there = capabilities(device)
    low = dtype or there.auto
    return _target(
        there,
        dtype,
        load=lambda: profile.load(device),
        has_kernel=lambda node: kernels.has_kernel(node, low, device),
    )


def target_for(absent: Capabilities, dtype: torch.dtype | None) -> Target:
    """A device that this machine need not have. It is taken to have a kernel for every operator.

    Args:
        absent: what it can do; nothing is asked of the device itself.
        dtype: what was asked for; None: "auto".

    Raises:
        MPCompileError: `MPCOMPILE_PROFILE` names no profile.
    """
    return _target(
        absent, dtype, load=lambda: profile.load_for(absent), has_kernel=lambda node: True
    )


def _target(
    asked: Capabilities,
    dtype: torch.dtype | None,
    *,
    load: Callable[[], profile.Profile | None],
    has_kernel: Callable[[fx.Node], bool],
) -> Target:
    low = dtype or asked.auto
    units = asked.has_units(low)
    # The profile decides which products are worth it, but not where one asked for a dtype that is
    # slow. FP16 on a CPU, say: one wants to see what it does to the numbers.
    for_speed = dtype is None or (dtype is asked.auto and units)
    return Target(
        device=asked.device,
        low=low,
        profile=load() if for_speed else None,
        promised=dtype is not None or units,
        cores=asked.matrix_units(),
        has_kernel=has_kernel,
    )
