"""How a loss scale moves: its constants, its state, and the rule that updates the state.

    an overflow                  scale x backoff_factor, not below min_scale, once there were
                                 `hysteresis` overflows; the count of good steps restarts at 0
    growth_interval good steps   scale x growth_factor, not above max_scale
    any overflow                 skipped_steps + 1

This is the dynamic scale of NVIDIA's guide to mixed precision. The functions are pure, and written
once for numbers and for 0-d tensors: `LossScale` calls them with numbers; what an optimizer step
decides (`optim/decide.py`) calls them with tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..errors import MPCompileError

# The start of the dynamic scale, as GradScaler's; also the largest start that a search may find.
INIT_SCALE = 2.0**16
# Gradients of later steps may be so many times as large as those that the start was found with.
HEADROOM = 8.0

_Flag: TypeAlias = Any  # a bool, or a 0-d bool tensor
_Number: TypeAlias = Any  # a float or an int, or a 0-d tensor


@dataclass(frozen=True)
class ScaleRule:
    """The constants of one loss scale; `LossScale.dynamic` explains each.

    Attributes:
        kind: "dynamic"; or "static" or "none", for a scale that never moves.
    """

    kind: str = "dynamic"
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 2.0**-14  # large errors summed over a batch may fit only below 1
    max_scale: float = 2.0**24

    @property
    def dynamic(self) -> bool:
        return self.kind == "dynamic"

    def check(self, init_scale: float | None, start: float) -> None:
        """Refuse constants that make no sense.

        Args:
            init_scale: the first scale as the user gave it.
            start: the one that is meant by it.

        Raises:
            MPCompileError: a factor, interval or bound that makes no sense.
        """
        growth, backoff = self.growth_factor, self.backoff_factor
        interval, hysteresis = self.growth_interval, self.hysteresis
        bounds = f"min_scale={self.min_scale}, max_scale={self.max_scale}"
        fits = not self.dynamic or 0 < self.min_scale <= start <= self.max_scale
        checks = {
            f"init_scale={init_scale}: must be positive and finite": 0 < start < float("inf"),
            f"growth_factor={growth}: must be above 1": growth > 1,
            f"backoff_factor={backoff}: must be between 0 and 1": 0 < backoff < 1,
            f"growth_interval={interval}: must be a whole number from 1": _is_count(interval),
            f"hysteresis={hysteresis}: must be a whole number from 1": _is_count(hysteresis),
            f"{bounds}: need 0 < min <= init <= max": fits,
        }
        for complaint, fine in checks.items():
            if not fine:
                given, _, what = complaint.partition(": ")
                raise MPCompileError(f"LossScale.{self.kind}({given}): {what}")


def rule_of(given: Any) -> ScaleRule:
    """The rule that a LossScale is made with. Raises MPCompileError if it is none."""
    if not isinstance(given, ScaleRule):
        raise MPCompileError(
            "LossScale(...): make one by LossScale.dynamic(init_scale=...), .grad_scaler(), "
            ".static(128.0) or .none()"
        )
    return given


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _constant(name: str) -> Any:
    def set_it(scale: Ruled, value: Any) -> None:
        scale.rule = dataclasses.replace(scale.rule, **{name: value})

    return property(lambda scale: getattr(scale.rule, name), set_it)


class Ruled:
    """What has a rule, with the constants of the rule as attributes: read off it, and set in it."""

    rule: ScaleRule
    kind: str = _constant("kind")
    growth_factor: float = _constant("growth_factor")
    backoff_factor: float = _constant("backoff_factor")
    growth_interval: int = _constant("growth_interval")
    hysteresis: int = _constant("hysteresis")
    min_scale: float = _constant("min_scale")
    max_scale: float = _constant("max_scale")


@dataclass(frozen=True)
class ScaleState:
    """The values that change while training: numbers, or 0-d tensors where a step keeps them on a
    device.

    Attributes:
        scale: the factor of the gradients; FP32 if it is a tensor.
        good_steps: steps since the scale last moved or a gradient overflowed.
        overflows_left: how many more overflows lower the scale.
        skipped_steps: steps that any optimizer skipped because of an overflow.
        hit: whether an overflow was counted since the last training forward.
        floor: whether an overflow has come at the lowest scale.

    `hit` and `floor` belong to one run: checkpoints don't keep them, and comparisons of states
    ignore them.
    """

    scale: float
    good_steps: int = 0
    overflows_left: int = 1
    skipped_steps: int = 0
    hit: bool = field(default=False, compare=False)
    floor: bool = field(default=False, compare=False)

    def saved(self) -> dict[str, Any]:
        """The fields that a checkpoint keeps, by name."""
        return {name: getattr(self, name) for name in SAVED_FIELDS}

    @classmethod
    def loaded(cls, saved: Mapping[str, Any], hysteresis: int) -> ScaleState:
        """The values in a state dict of a LossScale, or of a `torch.amp.GradScaler`.

        Raises:
            MPCompileError: the mapping is neither.
        """
        if {"kind", *SAVED_FIELDS} <= saved.keys():
            return cls(**{name: saved[name] for name in SAVED_FIELDS})
        if {"scale", "_growth_tracker"} <= saved.keys():
            return cls(float(saved["scale"]), int(saved["_growth_tracker"]), hysteresis)
        raise MPCompileError(
            f"LossScale.load_state_dict: keys {sorted(saved)} are neither a LossScale's nor a "
            "torch.amp.GradScaler's"
        )


SAVED_FIELDS = tuple(f.name for f in dataclasses.fields(ScaleState) if f.compare)
_DTYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}
# The fields of a `ScaleState`, and their dtypes where they are tensors.
STATE_DTYPES = {f.name: _DTYPES[str(f.type)] for f in dataclasses.fields(ScaleState)}


def updated(rule: ScaleRule, state: ScaleState, overflow: _Flag) -> ScaleState:
    """The state after one optimizer step, if there is one step for each training forward.

    Args:
        overflow: whether the step was skipped, because a gradient was not finite.
    """
    skipped = state.skipped_steps + overflow
    if not rule.dynamic:
        return dataclasses.replace(state, skipped_steps=skipped)
    left, good = state.overflows_left - 1, state.good_steps + 1
    lowered = overflow & (left <= 0)
    raised = _not(overflow) & (good >= rule.growth_interval)
    lower = _at_least(state.scale * rule.backoff_factor, rule.min_scale)
    higher = _at_most(state.scale * rule.growth_factor, rule.max_scale)
    return dataclasses.replace(
        state,
        scale=_where(lowered, lower, _where(raised, higher, state.scale)),
        good_steps=_fill(good, overflow | raised, 0),
        overflows_left=_fill(
            _where(overflow, left, state.overflows_left), lowered | raised, rule.hysteresis
        ),
        skipped_steps=skipped,
    )


def settled(rule: ScaleRule, state: ScaleState, overflow: _Flag, first: _Flag) -> ScaleState:
    """The state after one optimizer step, if there may be several for each training forward:
    the scale moves for the first step, and after that for the first that overflows.

    Args:
        overflow: whether the step was skipped, because a gradient was not finite.
        first: whether no other step came since the last training forward.
    """
    after = updated(rule, state, overflow)
    if not rule.dynamic:
        return after
    hit = state.hit & _not(first)
    fresh = overflow & _not(hit)
    moves = first | fresh
    return ScaleState(
        scale=_where(moves, after.scale, state.scale),
        good_steps=_where(moves, after.good_steps, state.good_steps),
        overflows_left=_where(moves, after.overflows_left, state.overflows_left),
        skipped_steps=after.skipped_steps,
        hit=overflow | hit,
        floor=state.floor | (fresh & (state.scale <= rule.min_scale)),
    )


# -- operations that differ between numbers and tensors -------------------------------------------


def _not(flag: _Flag) -> _Flag:
    return flag.logical_not() if isinstance(flag, torch.Tensor) else not flag


def _where(condition: _Flag, then: _Number, otherwise: _Number) -> _Number:
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, then, otherwise)
    return then if condition else otherwise


def _fill(number: _Number, condition: _Flag, constant: int) -> _Number:
    if isinstance(number, torch.Tensor):
        return number.masked_fill(condition, constant)
    return constant if condition else number


def _at_least(number: _Number, constant: float) -> _Number:
    return number.clamp_min(constant) if isinstance(number, torch.Tensor) else max(number, constant)


def _at_most(number: _Number, constant: float) -> _Number:
    return number.clamp_max(constant) if isinstance(number, torch.Tensor) else min(number, constant)
