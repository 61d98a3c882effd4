"""The one place that lists device types: device type -> the capabilities of its devices."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import MPCompileError
from .capabilities import Capabilities
from .cpu import CPU
from .cuda import cuda_or_rocm

__all__ = ["KINDS", "capabilities", "default_device", "is_supported", "supported"]

KINDS: dict[str, Callable[[torch.device], Capabilities]] = {"cuda": cuda_or_rocm, "cpu": CPU}
"""The device types that mpcompile compiles for. The first that this machine has is the default."""


def capabilities(device: torch.device | str) -> Capabilities:
    """The capabilities of a device.

    Raises:
        MPCompileError: the type of the device is not supported.
    """
    device = torch.device(device)
    if device.type not in KINDS:
        raise MPCompileError(
            f"device type {device.type!r} is not supported; mpcompile works on "
            f"{' and '.join(KINDS)}: move the model there first"
        )
    return KINDS[device.type](device)


def is_supported(device: torch.device | str) -> bool:
    """Whether mpcompile compiles for devices of this type."""
    return torch.device(device).type in KINDS


def supported() -> tuple[str, ...]:
    """The supported device types, the preferred one first."""
    return tuple(KINDS)


def default_device() -> torch.device:
    """The first device of the first type that this machine has: CUDA before the CPU."""
    found = next(one for one in map(capabilities, KINDS) if one.is_there())
    return torch.device(found.device.type, 0) if found.count() else found.device
