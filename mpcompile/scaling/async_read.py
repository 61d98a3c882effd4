"""Numbers on the device that the host reads once they have arrived, without waiting for them."""

from __future__ import annotations

from typing import Any

import torch

from ..devices.registry import capabilities


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
