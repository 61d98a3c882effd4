"""The live numbers of a loss scale: where they are kept, and when they move.

They are Python numbers until a generated optimizer step moves them. From then on they reside on its
device, so that the step need not wait for the host. The rule itself is in `ir/scale.py`.
"""

from __future__ import annotations

import dataclasses

import torch

from ..ir.scale import STATE_DTYPES, ScaleRule, ScaleState, settled, updated


class LiveScale:
    """The numbers of one loss scale while training.

    Attributes:
        moves: grows whenever the scale may have changed: between equal `moves` it is one number.
    """

    def __init__(self, state: ScaleState) -> None:
        self.moves = 0
        self._numbers = state
        self._resident: dict[str, torch.Tensor] = {}  # the numbers, once they reside on a device
        self._forwards = 0  # training forwards seen; the scale moves once for each
        self._moved_at = 0
        self._early = False  # it was lowered for an overflow whose step is still to come
        self._tensors: dict[torch.device, tuple[float, torch.Tensor]] = {}

    @property
    def state(self) -> ScaleState:
        """All numbers. Where they reside on a GPU, this waits for it."""
        if not self._resident:
            return self._numbers
        numbers = {name: tensor.item() for name, tensor in self._resident.items()}
        return ScaleState(**numbers)  # type: ignore[arg-type]

    @property
    def scale(self) -> float:
        """The scale alone. Where it resides on a GPU, this waits for it."""
        if not self._resident:
            return self._numbers.scale
        return float(self._resident["scale"].item())

    def set(self, state: ScaleState) -> None:
        """Take over a state from outside, of which no overflow has been counted yet."""
        self._take(dataclasses.replace(state, hit=False, floor=False), self.state)

    def start_at(self, scale: float) -> None:
        """Take over what the search for the start has found. The forward that is being searched
        used it already, so for whoever asks `moves` it is the same number.
        """
        self._numbers = dataclasses.replace(self._numbers, scale=scale)
        if self._resident:
            self._resident["scale"].fill_(scale)

    def _take(self, after: ScaleState, before: ScaleState) -> None:
        self.moves += after.scale != before.scale
        self._numbers = after
        for name, tensor in self._resident.items():
            if (number := getattr(after, name)) != getattr(before, name):
                tensor.fill_(number)

    # -- on a device ------------------------------------------------------------------------------

    def tensor(self, device: torch.device, *, shared: bool) -> torch.Tensor:
        """The scale for a forward to multiply by: 0-d FP32 on `device`. A new value is a new
        tensor, as a backward that is still to come divides by what its forward multiplied with.

        Args:
            shared: use one tensor for all forwards until `forget_tensors`, whatever the value.
        """
        if self._resident and not shared:
            return self._resident["scale"].clone()
        value, held = self.scale, self._tensors.get(device)
        if held is None or held[0] != value:
            held = value, torch.tensor(value, dtype=torch.float32, device=device)
            self._tensors[device] = held
        return held[1]

    def forget_tensors(self) -> None:
        """Let the next forward use a new tensor: the last one will be, or was, written to."""
        self._tensors.clear()

    def reside(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Keep the numbers on `device` from now on: 0-d tensors by the fields of `ScaleState`,
        which a generated step writes to.
        """
        if not self._resident:
            self._resident = {
                name: torch.tensor(getattr(self._numbers, name), dtype=dtype, device=device)
                for name, dtype in STATE_DTYPES.items()
            }
        return self._resident

    def resident(self, name: str) -> torch.Tensor | None:
        """One of the tensors of `reside`, once the numbers reside there."""
        return self._resident.get(name)

    # -- how it moves -----------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A training forward is about to run: the next step may move the scale again."""
        self._forwards += 1

    def _is_first_step(self) -> bool:
        first, self._moved_at = self._moved_at != self._forwards, self._forwards
        return first

    def settle(self, rule: ScaleRule, overflow: bool) -> bool:
        """Conclude an optimizer step. Returns whether an overflow has come at the lowest scale."""
        first, before = self._is_first_step(), self.state
        counted = before
        if overflow and self._early:
            first = self._early = False
            counted = dataclasses.replace(before, hit=True)
        after = settled(rule, counted, overflow, first)
        self._take(after, before)
        return after.floor

    def begin_step(self, rule: ScaleRule) -> bool:
        """A generated step is about to move the scale: whether it is the first since the last
        training forward.
        """
        first = self._is_first_step()
        self.moves += rule.dynamic
        if self._early and self._resident:
            self._resident["hit"].fill_(True)
            first = self._early = False
        return first

    def move_without_step(self, rule: ScaleRule, overflow: bool, *, step_will_come: bool) -> None:
        """Move for a backward that no optimizer's step looked at; no step counts as skipped."""
        self._early |= overflow and step_will_come
        before = self.state
        after = updated(rule, before, overflow)
        self._take(dataclasses.replace(after, skipped_steps=before.skipped_steps), before)

    def count_skipped(self) -> None:
        """Count a skipped step, and move nothing."""
        before = self.state
        self._take(dataclasses.replace(before, skipped_steps=before.skipped_steps + 1), before)
