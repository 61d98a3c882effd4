"""Numbers on the device that the host reads once they have arrived, without waiting for them."""

from __future__ import annotations

from typing import Any

import torch

from ..devices.registry import capabilities


class HostBuffers:
    """Memory of the host, and events, for looks at numbers like these: each is used again once its
    look has been read. To pin memory and to make an event takes longer than the copy.
    """

    def __init__(self) -> None:
        self._free: list[_Buffer] = []

    def at(self, *values: torch.Tensor) -> AsyncRead:
        """Look at 0-d tensors of one device."""
        for i, place in enumerate(self._free):
            if place.is_like(values):
                return AsyncRead(*values, place=self._free.pop(i), looks=self)
        return AsyncRead(*values, looks=self)

    def take_back(self, place: _Buffer) -> None:
        self._free.append(place)


class _Buffer:
    """Pinned memory for some numbers, and the event that tells when they are there."""

    def __init__(self, values: tuple[torch.Tensor, ...]) -> None:
        self.device = values[0].device
        self.mirrors = tuple(torch.zeros_like(v, device="cpu").pin_memory() for v in values)
        self.event: Any = None

    def is_like(self, values: tuple[torch.Tensor, ...]) -> bool:
        """Whether the memory is for numbers of this device and these dtypes."""
        dtypes = [mirror.dtype for mirror in self.mirrors]
        return self.device == values[0].device and dtypes == [value.dtype for value in values]

    def fetch(self, values: tuple[torch.Tensor, ...]) -> None:
        """Copy them, when the device gets there."""
        for mirror, value in zip(self.mirrors, values, strict=True):
            mirror.copy_(value, non_blocking=True)
        self.event = capabilities(self.device).record_event(self.event)


class AsyncRead:
    """0-d tensors of one device, readable once they have arrived: on a CPU at once, as they are
    then; on a GPU after a copy.

    Args:
        place: where they are copied to; None: new memory.
        looks: takes the place back once they are read.
    """

    def __init__(
        self, *values: torch.Tensor, place: _Buffer | None = None, looks: HostBuffers | None = None
    ) -> None:
        self._place: _Buffer | None = None
        self._mirrors, self._looks = values, looks
        self._numbers: tuple[int | float | bool, ...] | None = None
        if capabilities(values[0].device).asynchronous:
            self._place = place or _Buffer(values)
            self._place.fetch(values)
            self._mirrors = self._place.mirrors

    def wait(self) -> None:
        if self._place is not None:
            self._place.event.synchronize()

    def read(self) -> tuple[int | float | bool, ...] | None:
        """The numbers, or None if they have not arrived yet."""
        if self._numbers is None:
            if self._place is not None and not self._place.event.query():
                return None
            # Read the memory directly: the tensor's `.item()` is an operator that may synchronise.
            self._numbers = tuple([mirror.numpy().item() for mirror in self._mirrors])
            if self._place is not None and self._looks is not None:
                self._looks.take_back(self._place)
            self._place, self._mirrors = None, ()
        return self._numbers
