"""Look at a flag on the device without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..loss_scale import LossScale


class Watch:
    """Warns once a loss scale is stuck at its floor; a step late on a GPU, never blocking."""

    def __init__(self) -> None:
        self._looks: dict[int, _Look] = {}

    def follow(self, scales: Iterable[LossScale]) -> None:
        for scale in scales:
            if scale.kind == "dynamic" and id(scale) not in self._looks:
                self._looks[id(scale)] = _Look(scale)

    def look(self) -> None:
        for look in self._looks.values():
            look.look()


class _Look:
    """One flag and what the host knows of it."""

    def __init__(self, scale: LossScale) -> None:
        self.scale = scale
        self.flag: torch.Tensor | None = None
        self.mirror: torch.Tensor  # the flag itself on a CPU, else its copy in pinned memory
        self.event: torch.cuda.Event | None = None  # after the last copy

    def look(self) -> None:
        flag = self.scale.floor
        if flag is None:
            return
        on_cpu = flag.device.type == "cpu"
        if flag is not self.flag:
            self.flag, self.event = flag, None
            self.mirror = flag if on_cpu else torch.zeros_like(flag, device="cpu").pin_memory()
        if self.event is not None and not self.event.query():
            return
        if self.mirror.numpy()[()]:  # a read of memory: `.item()` would be a synchronisation
            self.scale.warn_at_floor()
        if not on_cpu:
            self.mirror.copy_(flag, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
