"""A number on the device that the host reads once it is there, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch

from ..devices.registry import capabilities


class Later:
    """One 0-d tensor, read when it has arrived: on a CPU at once, on a GPU after its copy."""

    def __init__(self, value: torch.Tensor) -> None:
        self._event: Any = None
        device = capabilities(value.device)
        if not device.asynchronous:
            self._mirror = value
        else:
            self._mirror = torch.zeros_like(value, device="cpu").pin_memory()
            self._mirror.copy_(value, non_blocking=True)
            self._event = device.record_event()

    def read(self) -> int | float | bool | None:
        """The number, or None: not yet there."""
        if self._event is not None and not self._event.query():
            return None
        # A read of memory: the tensor's `.item()` would be a synchronisation.
        number: int | float | bool = self._mirror.numpy().item()
        return number
