"""Look at a flag on the device without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
    def __init__(self, scale: LossScale) -> None:
        self.scale = scale
        self.flag: torch.Tensor | None = None
        self.view: Any = None
        self.event: torch.cuda.Event | None = None

    def look(self) -> None:
        flag = self.scale.floor
        if flag is None:
            return
        if flag is not self.flag:
            self.flag = flag
            mirror = (
                flag
                if flag.device.type == "cpu"
                else torch.empty_like(flag, device="cpu").pin_memory()
            )
            self.view, self.mirror = mirror.numpy(), mirror
        if flag.device.type != "cpu":
            if self.event is not None and not self.event.query():
                return
            seen = self.event is not None and bool(self.view[()])
            self.mirror.copy_(flag, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            seen = bool(self.view[()])
        if seen:
            self.scale.warn_at_floor()
