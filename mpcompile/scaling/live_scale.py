"""The current values of a loss scale: where they are kept, when they move, and the log of that.

They are Python numbers until a generated optimizer step moves them. From then on they are tensors
on its device, so that the step need not wait for the host. The rule itself is in `ir/scale.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import torch

from .. import logs
from ..devices.registry import capabilities
from ..ir.scale import STATE_DTYPES, ScaleRule, ScaleState, settled, updated
from .async_read import Later

_EVERY = 8  # generated steps between two reads of what a GPU has skipped


class LiveScale:
    """The current values of one loss scale while training.

    Attributes:
        moves: grows whenever the scale may have changed: while it is equal, so is the scale.
        forwards: how many training forwards there were; the scale moves once for each.
        replaced: how many times a state was loaded, or set back.
    """

    def __init__(self, state: ScaleState) -> None:
        self.moves = 0
        self._numbers = state
        self._resident: dict[str, torch.Tensor] = {}  # the values, once they are kept on a device
        self.forwards = self.replaced = 0
        self._moved_at = 0
        self._early = False  # already lowered for an overflow, before its step
        self._tensors: dict[tuple[torch.device, bool], tuple[float, torch.Tensor]] = {}
        self._log = ScaleLog(state)
        self._skipped = state.skipped_steps  # as far as the host knows of generated steps
        self._arriving: Later | None = None
        self._asked = 0

    @property
    def state(self) -> ScaleState:
        """All values. Where they are kept on a GPU, this waits for it."""
        if not self._resident:
            return self._numbers
        numbers = {name: tensor.item() for name, tensor in self._resident.items()}
        return ScaleState(**numbers)  # type: ignore[arg-type]

    @property
    def skipped_before(self) -> int:
        """How many steps were skipped before generated steps counted; known to the host."""
        return self._numbers.skipped_steps

    @property
    def scale(self) -> float:
        """The scale alone. Where it is kept on a GPU, this waits for it."""
        if not self._resident:
            return self._numbers.scale
        return float(self._resident["scale"].item())

    def set(self, state: ScaleState) -> None:
        """Take over a loaded state, of which no overflow has been counted yet."""
        self.replaced += 1
        self._log.start_at(state.scale, state.skipped_steps)
        self._take(dataclasses.replace(state, hit=False, floor=False), self.state)

    def start_at(self, scale: float, *, found: bool) -> None:
        """Take over the scale that a search has found: the start, or (not `found`) another one.
        The search also writes to the tensor that the forward being searched has used.
        """
        good = self.state.good_steps if found else 0  # after an overflow they are counted anew
        if found:
            self._log.start_at(scale)
        else:
            self._log.move_to(scale)
        self._numbers = dataclasses.replace(self._numbers, scale=scale, good_steps=good)
        if self._resident:
            self._resident["scale"].fill_(scale)
            self._resident["good_steps"].fill_(good)

    def _take(self, after: ScaleState, before: ScaleState) -> None:
        self.moves += after.scale != before.scale
        self._numbers = after
        for name, tensor in self._resident.items():
            if (number := getattr(after, name)) != getattr(before, name):
                tensor.fill_(number)
        self._log.learn(after.scale, after.skipped_steps)

    # -- on a device ------------------------------------------------------------------------------

    def tensor(self, device: torch.device, *, shared: bool) -> torch.Tensor:
        """The scale for a forward to multiply by: 0-d FP32 on `device`. A new value gets a new
        tensor: a backward still to come must divide by the number that its forward multiplied by.

        Args:
            shared: it is for forwards whose backward may search: they use one tensor, which the
                search writes to, until `forget_tensors`. No other forward uses that one.
        """
        if self._resident and not shared:
            return self._resident["scale"].clone()
        value, held = self.scale, self._tensors.get((device, shared))
        if held is None or held[0] != value:
            held = value, torch.tensor(value, dtype=torch.float32, device=device)
            self._tensors[device, shared] = held
        return held[1]

    def forget_tensors(self) -> None:
        """Make the next forward use a new tensor: the last one is, or will be, written to."""
        self._tensors.clear()

    def reside(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Keep the values on `device` from now on, and return them: 0-d tensors by the fields of
        `ScaleState`. A generated step writes to them.
        """
        if not self._resident:
            self._resident = {
                name: torch.tensor(getattr(self._numbers, name), dtype=dtype, device=device)
                for name, dtype in STATE_DTYPES.items()
            }
        return self._resident

    def resident(self, name: str) -> torch.Tensor | None:
        """One of the tensors of `reside`, or None before they exist."""
        return self._resident.get(name)

    def has_skipped(self) -> bool | None:
        """Whether generated steps were skipped since the last answer, or None while that is not
        known: a GPU is asked in every eighth step, and has not answered yet.
        """
        if self._arriving is None:
            if (count := self._resident.get("skipped_steps")) is None:
                return None
            self._asked += 1
            if self._asked % _EVERY and capabilities(count.device).asynchronous:
                return None
            self._arriving = Later(count)
        skipped = self._arriving.read()
        if skipped is None:
            return None
        self._arriving = None
        before, self._skipped = self._skipped, int(skipped)
        return self._skipped > before

    def log_moves(self) -> None:
        """Log how generated steps have moved the values, as far as that has arrived."""
        self._log.look(self._resident)

    # -- how it moves -----------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A training forward is about to run: the next step may move the scale again."""
        self.forwards += 1

    def _is_first_step(self) -> bool:
        first, self._moved_at = self._moved_at != self.forwards, self.forwards
        return first

    def settle(self, rule: ScaleRule, overflow: bool) -> bool:
        """Conclude an optimizer step. Returns whether an overflow came at the lowest scale."""
        first, before = self._is_first_step(), self.state
        counted = before
        if overflow and self._early:
            first = self._early = False
            counted = dataclasses.replace(before, hit=True)
        after = settled(rule, counted, overflow, first)
        self._take(after, before)
        return after.floor

    def begin_step(self, rule: ScaleRule) -> bool:
        """Prepare for a generated step that will move the scale. Returns whether it is the first
        step since the last training forward.
        """
        first = self._is_first_step()
        self.moves += rule.dynamic
        if self._early and self._resident:
            self._resident["hit"].fill_(True)
            first = self._early = False
        return first

    def move_without_step(self, rule: ScaleRule, overflow: bool, *, step_will_come: bool) -> None:
        """Move for a backward that no optimizer's step checked; no step counts as skipped."""
        self._early |= overflow and step_will_come
        before = self.state
        after = updated(rule, before, overflow)
        self._take(dataclasses.replace(after, skipped_steps=before.skipped_steps), before)

    def count_skipped(self) -> None:
        """Count a skipped step, without moving the scale."""
        before = self.state
        self._take(dataclasses.replace(before, skipped_steps=before.skipped_steps + 1), before)


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
