"""The one place that lists device types: device type -> the capabilities of its devices; and what
is done with devices of all types: sums are added in FP32, random states are kept, and numbers are
read once they have arrived, without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import MPCompileError, warn
from ..torch_inside.names import FakeTensor, is_functorch_wrapped_tensor
from .capabilities import Capabilities
from .cpu import CPU
from .cuda import cuda_or_rocm

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


def is_real(value: torch.Tensor) -> bool:
    """Whether a tensor has data: not in a transform, a trace, or a recorded CUDA graph."""
    if isinstance(value, FakeTensor) or value.is_meta or is_functorch_wrapped_tensor(value):
        return False
    return not capabilities(value.device).is_recording()


# -- sums ------------------------------------------------------------------------------------------


def accumulate_in_fp32() -> None:
    """Make the libraries of all device types accumulate products of the low dtypes in FP32: by
    default cuBLAS may add parts of a sum in FP16.

    The setting belongs to the process, and Dynamo guards on it, so a backend must not change it
    while a frame is compiled. It is set when `mpcompile` is first used, before anything is
    compiled. If a user changes it back afterwards, the change stands, with a warning.
    """
    for kind in supported():
        capabilities(kind).accumulate_in_fp32()


def check_accumulation(device: torch.device, low: torch.dtype) -> None:
    """Warn if sums of products in `low` may be accumulated in `low` on `device`."""
    if (setting := capabilities(device).low_accumulation(low)) is not None:
        warn(
            f"{setting} is True: parts of a product's sums may be added in the low dtype. "
            "mpcompile(...) sets it to False; leave it so, or set it to False before the model is "
            "first called"
        )


# -- random states ---------------------------------------------------------------------------------


class RandomState:
    """The states of the host's and some devices' generators at the time this is made.

    Devices of an unsupported type are left out: mpcompile draws no random numbers there.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        used = dict.fromkeys((torch.device("cpu"), *filter(is_supported, devices)))
        self._states = [(one, one.random_state()) for one in map(capabilities, used)]

    def restore(self) -> None:
        """Restore all of these states."""
        for one, state in self._states:
            one.set_random_state(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context that begins with these states; afterwards they are what they were before it."""
        with unchanged(one.device for one, _ in self._states):
            self.restore()
            yield


@contextmanager
def unchanged(devices: Iterable[torch.device]) -> Iterator[None]:
    """A context that leaves the random states of the host and the devices unchanged."""
    before = RandomState(devices)
    try:
        yield
    finally:
        before.restore()


class AsyncRead:
    """0-d tensors of one device, readable once they have arrived: on a CPU at once, as they are
    then; on a GPU after a copy.
    """

    def __init__(self, *values: torch.Tensor) -> None:
        self._mirrors: tuple[torch.Tensor, ...] = values
        self._event: Any = None
        self._numbers: tuple[int | float | bool, ...] | None = None
        there = capabilities(values[0].device)
        if there.asynchronous:
            empty = (torch.zeros_like(value, device="cpu") for value in values)
            self._mirrors = tuple(mirror.pin_memory() for mirror in empty)
            for mirror, value in zip(self._mirrors, values, strict=True):
                mirror.copy_(value, non_blocking=True)
            self._event = there.record_event()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> tuple[int | float | bool, ...] | None:
        """The numbers, or None if they have not arrived yet."""
        if self._numbers is None:
            if self._event is not None and not self._event.query():
                return None
            # Read the memory directly: the tensor's `.item()` is an operator that may synchronise.
            self._numbers = tuple([mirror.numpy().item() for mirror in self._mirrors])
            self._event, self._mirrors = None, ()
        return self._numbers
