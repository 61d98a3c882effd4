"""A number on the device that the host reads once it has arrived, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch

from ..devices.registry import capabilities


class Later:
    """One 0-d tensor, readable once it has arrived: on a CPU at once, on a GPU after its copy.

    Attributes:
        value: the tensor.
        is_copy: whether what is read is as old as this object; else it is the tensor as it is.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self._event: Any = None
        device = capabilities(value.device)
        if not device.asynchronous:
            self._mirror = value
        else:
            self._mirror = torch.zeros_like(value, device="cpu").pin_memory()
            self._mirror.copy_(value, non_blocking=True)
            self._event = device.record_event()

    @property
    def is_copy(self) -> bool:
        return self._event is not None

    def wait(self) -> None:
        """Wait until it has arrived."""
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> int | float | bool | None:
        """The number, or None if it has not arrived yet."""
        if self._event is not None and not self._event.query():
            return None
        # Read the memory directly: the tensor's `.item()` would synchronise.
        number: int | float | bool = self._mirror.numpy().item()
        return number
