"""Numbers on the device that the host reads once they have arrived, without waiting for them."""

from __future__ import annotations

from typing import Any

import torch

from ..devices.registry import capabilities

# Pinned memory for some numbers, and the event that tells when they are there.
_Buffer = tuple[tuple[torch.Tensor, ...], Any]


class HostBuffers:
    """Memory of the host, and events, for looks at numbers like these: each is used again once its
    look has been read. To pin memory and to make an event takes longer than the copy.
    """

    def __init__(self) -> None:
        self._free: dict[object, list[_Buffer]] = {}  # by the device and the dtypes

    def at(self, *values: torch.Tensor) -> AsyncRead:
        """Look at 0-d tensors of one device."""
        like = values[0].device, *(value.dtype for value in values)
        return AsyncRead(values, self._free.setdefault(like, []))


class AsyncRead:
    """0-d tensors of one device, readable once they have arrived: on a CPU at once, as they are
    then; on a GPU after a copy.

    Args:
        free: where they may be copied to; takes the place back once they are read.
    """

    def __init__(self, values: tuple[torch.Tensor, ...], free: list[_Buffer]) -> None:
        self._mirrors, self._free = values, free
        self._event: Any = None
        self._numbers: tuple[int | float | bool, ...] | None = None
        there = capabilities(values[0].device)
        if there.asynchronous:
            if free:
                self._mirrors, self._event = free.pop(0)
            else:
                empty = (torch.zeros_like(value, device="cpu") for value in values)
                self._mirrors = tuple(mirror.pin_memory() for mirror in empty)
            for mirror, value in zip(self._mirrors, values, strict=True):
                mirror.copy_(value, non_blocking=True)
            self._event = there.record_event(self._event)

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
            if self._event is not None:
                self._free.append((self._mirrors, self._event))
            self._event, self._mirrors = None, ()
        return self._numbers
