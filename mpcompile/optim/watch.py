"""Reads flags from the device without waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..state.async_read import Later
from ..state.loss_scale import LossScale


class Watch:
    """Tells loss scales of each step, warns once if one is stuck at its floor, and logs how they
    move. On a GPU the message comes a step late, without waiting.
    """

    def __init__(self) -> None:
        self._looks: dict[int, _Look] = {}
        self._scales: tuple[LossScale, ...] = ()

    def follow(self, scales: Iterable[LossScale]) -> None:
        """A generated step has run over the gradients of these scales."""
        self._scales = tuple(scales)
        for scale in self._scales:
            if scale.kind == "dynamic" and id(scale) not in self._looks:
                self._looks[id(scale)] = _Look(scale, "floor", scale.warn_at_floor)

    def look(self) -> None:
        for scale in self._scales:
            scale.stepped()
        self._scales = ()
        for look in self._looks.values():
            look.look()
            look.scale.live.log_moves()


class _Look:
    """One number of a scale's state, and the function to call once it is not zero."""

    def __init__(self, scale: LossScale, name: str, say: Callable[[], None]) -> None:
        self.scale, self.name, self.say = scale, name, say
        self.arriving: Later | None = None
        self.said = False

    def look(self) -> None:
        tensor: torch.Tensor | None = self.scale.live.resident(self.name)
        if tensor is None or self.said:
            return
        if self.arriving is None or self.arriving.value is not tensor:
            self.arriving = Later(tensor)
        if (number := self.arriving.read()) is not None:
            if self.arriving.is_copy:
                self.arriving = None
            if number:
                self.said = True
                self.say()
