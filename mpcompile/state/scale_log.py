"""Logs how a loss scale moves, as far as the host knows."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from .. import logs
from ..ir.scale import ScaleState
from .async_read import Later


class ScaleLog:
    """What the log has said of one loss scale: its value, and how many steps were skipped."""

    def __init__(self, state: ScaleState) -> None:
        self._arriving: tuple[Later, Later] | None = None
        self._scale, self._skipped = state.scale, state.skipped_steps

    def start_at(self, scale: float, skipped: int | None = None) -> None:
        """Take these values for known, and log nothing: they were found, or loaded."""
        self._arriving = None  # older than what is known now
        self._scale = scale
        self._skipped = self._skipped if skipped is None else skipped

    def move_to(self, scale: float) -> None:
        """Log that a search has moved the scale."""
        self.learn(scale, self._skipped)

    def learn(self, scale: float, skipped: int) -> None:
        """Log what is new in these values."""
        before, steps = self._scale, skipped - self._skipped
        self.start_at(scale, skipped)
        if steps:
            logs.event(
                "scale", logging.INFO, "skipped",
                "gradients overflowed at the loss scale %(scale)g; steps skipped: %(steps)d",
                scale=before, steps=steps,
            )  # fmt: skip
        if scale != before:
            logs.event(
                "scale", logging.INFO, "moved", "the loss scale moves from %(before)g to %(after)g",
                before=before, after=scale,
            )  # fmt: skip

    def look(self, resident: Mapping[str, torch.Tensor]) -> None:
        """Log what is new in the tensors that a generated step writes to, if anybody listens. It
        waits for nothing: on a GPU the line comes a step late.
        """
        if not resident or not logs.is_heard("scale", logging.INFO):
            return
        if self._arriving is None:
            self._arriving = Later(resident["scale"]), Later(resident["skipped_steps"])
        scale, skipped = (later.read() for later in self._arriving)
        if scale is not None and skipped is not None:
            self.learn(float(scale), int(skipped))
