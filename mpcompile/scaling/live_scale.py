"""The current values of a loss scale: where they are kept, when they move, and the log of that.

They are Python numbers until a generated optimizer step moves them. From then on they are tensors
on its device, so that the step need not wait for the host. The rule itself is in `ir/scale.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import NamedTuple

import torch

from .. import logs
from ..devices.registry import AsyncRead, capabilities
from ..ir.scale import STATE_DTYPES, ScaleRule, ScaleState, settled, updated
from ..torch_inside.tensors import holders

_EVERY = 8  # generated steps between two reads of what a GPU has skipped


class Stepped(NamedTuple):
    """What has become known of optimizers' steps since the last time.

    Attributes:
        steps, forwards: how many were concluded, and how many of them were their forward's first.
        skipped: how many of them were skipped.
        before: the scale before them.
        at_floor: whether an overflow has come at the lowest scale.
    """

    steps: int
    forwards: int
    skipped: int
    before: float
    at_floor: bool


class LiveScale:
    """The current values of one loss scale while training, and what the log has said of them.

    Attributes:
        rule: how they move.
        forwards: how many training forwards have begun; the scale moves once for each, at a step.
    """

    def __init__(self, state: ScaleState, rule: ScaleRule) -> None:
        self.rule = rule
        self._numbers = state
        self._resident: dict[str, torch.Tensor] = {}  # the values, once they are kept on a device
        self._must_wait = False  # whether reading one waits for the device
        self._copies: ScaleCopies | None = None  # where CUDA graphs want the same addresses
        self.forwards = 0
        self._moved_at = 0
        self._early = False  # already lowered for an overflow, before its step
        self._tensors: dict[torch.device, tuple[float, torch.Tensor]] = {}
        # What the host knows, and has logged.
        self._scale, self._skipped = state.scale, state.skipped_steps
        self._steps = self._forwards = 0  # generated steps, and forwards with some
        self._stepped_at = -1
        self._told = 0, 0, state.skipped_steps  # these, as `stepped` has told of them
        self._arriving: tuple[tuple[int, int], AsyncRead] | None = None

    @property
    def state(self) -> ScaleState:
        """All values. Where they are kept on a GPU, this waits for it."""
        if not self._resident:
            return self._numbers
        numbers = {name: tensor.item() for name, tensor in self._resident.items()}
        return ScaleState(**numbers)  # type: ignore[arg-type]

    @property
    def scale(self) -> float:
        """The scale alone. Where it is kept on a GPU, this waits for it."""
        if not self._resident:
            return self._numbers.scale
        return float(self._resident["scale"].item())

    def set(self, state: ScaleState) -> None:
        """Take over a loaded state, of which no overflow has been counted yet."""
        self._scale, self._skipped = state.scale, state.skipped_steps
        self._told = self._steps, self._forwards, state.skipped_steps
        self._take(dataclasses.replace(state, hit=False, floor=False), self.state)

    def start_at(self, scale: float) -> None:
        """Take over the start that a search has found."""
        self._arriving = None
        self._scale = scale
        self._numbers = dataclasses.replace(self._numbers, scale=scale)
        if self._resident:
            self._resident["scale"].fill_(scale)

    def _take(self, after: ScaleState, before: ScaleState) -> None:
        self._numbers = after
        for name, tensor in self._resident.items():
            if (number := getattr(after, name)) != getattr(before, name):
                tensor.fill_(number)
        self._arriving = None  # older than this
        self._log(after.scale, after.skipped_steps)

    def _log(self, scale: float, skipped: int) -> None:
        before, steps = self._scale, skipped - self._skipped
        self._scale, self._skipped = scale, skipped
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

    # -- on a device ------------------------------------------------------------------------------

    def tensor(self, device: torch.device, *, own: bool) -> torch.Tensor:
        """The scale for a forward to multiply by: 0-d FP32 on `device`. While it is held, nothing
        moves it: a backward still to come must divide by the number that its forward multiplied by.

        Args:
            own: whether the forward gets a tensor that no other forward has, to write to.
        """
        if self._resident and not own:
            scale = self._resident["scale"]
            return scale.clone() if self._copies is None else self._copies.of(scale)
        value, held = self.scale, self._tensors.get(device)
        if own or held is None or held[0] != value:
            held = value, torch.tensor(value, dtype=torch.float32, device=device)
            if not own:
                self._tensors[device] = held
        return held[1]

    def reside(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Keep the values on `device` from now on, and return them: 0-d tensors by the fields of
        `ScaleState`. A generated step writes to them.
        """
        if not self._resident:
            self._copies = ScaleCopies() if capabilities(device).cuda_graphs else None
            self._resident = {
                name: torch.tensor(getattr(self._numbers, name), dtype=dtype, device=device)
                for name, dtype in STATE_DTYPES.items()
            }
            self._must_wait = capabilities(device).asynchronous
        return self._resident

    def stepped(self) -> Stepped | None:
        """A generated step has run. What is new, or None while that is not known. It waits for
        nothing: a GPU is asked in every eighth step, or in each one if someone listens to the log,
        and answers a step late.
        """
        if not self._steps:  # what others skipped before is none of these
            self._told = 0, 0, self._numbers.skipped_steps
        self._steps += 1
        self._forwards += self._stepped_at != self.forwards
        self._stepped_at = self.forwards
        if self._arriving is None:
            waits = self._must_wait and self._steps % _EVERY
            if not self._resident or (waits and not logs.is_heard("scale", logging.INFO)):
                return None
            asked = (self._resident[name] for name in ("scale", "skipped_steps", "floor"))
            self._arriving = (self._steps, self._forwards), AsyncRead(*asked)
        now, later = self._arriving
        if (numbers := later.read()) is None:
            return None
        scale, skipped, floor = numbers
        known = *now, int(skipped)
        steps, forwards, new = (n - told for n, told in zip(known, self._told, strict=True))
        found = Stepped(steps, forwards, new, self._scale, bool(floor))
        self._arriving, self._told = None, known
        self._log(float(scale), int(skipped))
        return found

    # -- how it moves -----------------------------------------------------------------------------

    def _is_first_step(self) -> bool:
        first, self._moved_at = self._moved_at != self.forwards, self.forwards
        return first

    def settle(self, overflow: bool) -> Stepped:
        """Conclude an optimizer step that was decided about on the host."""
        forwards, self._stepped_at = int(self._stepped_at != self.forwards), self.forwards
        first, before = self._is_first_step(), self.state
        counted = before
        if overflow and self._early:
            first = self._early = False
            counted = dataclasses.replace(before, hit=True)
        after = settled(self.rule, counted, overflow, first)
        self._take(after, before)
        return Stepped(1, forwards, int(overflow), before.scale, after.floor)

    def begin_step(self) -> bool:
        """Prepare for a generated step that will move the scale. Returns whether it is the first
        step since the last training forward.
        """
        first = self._is_first_step()
        if self._early and self._resident:
            self._resident["hit"].fill_(True)
            first = self._early = False
        return first

    def move_without_step(self, overflow: bool, *, step_will_come: bool) -> None:
        """Move for a backward that no optimizer's step checked; no step counts as skipped."""
        self._early |= overflow and step_will_come
        before = self.state
        after = updated(self.rule, before, overflow)
        self._take(dataclasses.replace(after, skipped_steps=before.skipped_steps), before)

    def count_skipped(self) -> None:
        before = self.state
        self._take(dataclasses.replace(before, skipped_steps=before.skipped_steps + 1), before)


# More forwards than these that wait for their backward at once get memory of their own.
_PLACES = 8


class ScaleCopies:
    """Copies of the scale for forwards, each in memory that stays as it is while anybody holds it.

    A backward divides by the number that its forward multiplied by, so each forward gets a copy of
    a scale that a step moves in place. Memory of its own for each copy would lie elsewhere in each
    step, as the allocator pleases; and a CUDA graph, which has the addresses of what a backward
    saved, would be recorded again. So a copy goes into the first of a few places that nobody else
    holds. A training loop asks in the same order in each step, and gets the same addresses.

    Whether a place is free is asked of its memory: a forward that saved the copy, or a view of it,
    holds the memory and is counted. Work that the device has yet to do for its holders comes
    before the next copy on the same stream; so each stream has places of its own, as it has in
    torch's allocator.
    """

    def __init__(self) -> None:
        # By stream: a copy, its memory, and how many hold that where nobody else does.
        self._places: dict[object, list[tuple[torch.Tensor, torch.UntypedStorage, int]]] = {}
        self._taking = threading.Lock()  # two threads must not find the same place free

    def of(self, scale: torch.Tensor) -> torch.Tensor:
        """A copy of the scale as it is now, which nothing writes to as long as it is held."""
        places = self._places.setdefault(capabilities(scale.device).stream(), [])
        with self._taking:
            free = (place for place, memory, alone in places if holders(memory) == alone)
            if (copy := next(free, None)) is None:
                if len(places) == _PLACES:
                    return scale.clone()
                copy = torch.empty_like(scale)
                memory = copy.untyped_storage()
                places.append((copy, memory, holders(memory)))
            # Its holders are seen because what they get is another tensor. It shares the version
            # counter: were it written to while it is saved, autograd would refuse to go backward.
            return copy.copy_(scale).detach()
