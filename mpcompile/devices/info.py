"""The facts of a device that ``mpcompile info`` and the records of benchmarks show."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from .registry import capabilities, default_device

__all__ = ["DeviceFacts", "device_facts"]


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """All that ``mpcompile info`` says about one device, as text.

    Attributes:
        device: the torch name, e.g. ``"cuda:0"``.
        name: the maker's name of the part.
        dtype: the choice of ``dtype="auto"`` here.
        reason: why that dtype.
        matrix_units: the hardware that multiplies in a low dtype, or that there is none.
        memory: its size in GiB, or ``"unknown"``.
        libraries: the math libraries torch was built with and found, by name.
    """

    device: str
    name: str
    dtype: torch.dtype
    reason: str
    matrix_units: str
    memory: str
    libraries: Mapping[str, str]


def device_facts(device: torch.device | str | None = None) -> DeviceFacts:
    """Collect the facts of one device (default: `default_device`).

    Raises:
        MPCompileError: the device type is not supported.
    """
    one = capabilities(default_device() if device is None else device)
    memory = one.memory()
    return DeviceFacts(
        device=str(one.device),
        name=one.name(),
        dtype=one.auto,
        reason=one.why_auto(),
        matrix_units=one.units(),
        memory="unknown" if memory is None else f"{memory / 2**30:.1f} GiB",
        libraries=one.libraries(),
    )
