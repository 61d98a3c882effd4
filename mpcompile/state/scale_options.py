"""The constants of a loss scale's rule: as attributes of the `LossScale`, and checked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from ..errors import MPCompileError
from ..ir.scale import ScaleRule

if TYPE_CHECKING:
    from .loss_scale import LossScale

T = TypeVar("T")


class Setting(Generic[T]):
    """One constant of the rule, as an attribute of the LossScale."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, scale: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, scale: LossScale, owner: type) -> T: ...
    def __get__(self, scale: LossScale | None, owner: type) -> Any:
        return self if scale is None else getattr(scale.rule, self.name)

    def __set__(self, scale: LossScale, value: T) -> None:
        changed: dict[str, Any] = {self.name: value}
        scale.rule = dataclasses.replace(scale.rule, **changed)


def check(rule: ScaleRule, init_scale: float | None, start: float) -> None:
    """Refuse constants that make no sense.

    Raises:
        MPCompileError: a factor, interval or bound that makes no sense.
    """
    growth, backoff = rule.growth_factor, rule.backoff_factor
    interval, hysteresis = rule.growth_interval, rule.hysteresis
    bounds = f"min_scale={rule.min_scale}, max_scale={rule.max_scale}"
    fits = not rule.dynamic or 0 < rule.min_scale <= start <= rule.max_scale
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
            raise MPCompileError(f"LossScale.{rule.kind}({complaint})")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1
