"""How a loss scale moves, told in ifs: what `mpcompile.ir.scale` is compared with."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from mpcompile.ir.scale import ScaleRule


@dataclass
class Model:
    """One loss scale. `number` is the type it computes in: float, or numpy.float32 as a device."""

    rule: ScaleRule
    scale: Any
    number: Any = float
    good: int = 0
    skipped: int = 0
    hit: bool = False  # an overflow came since the last forward
    floor: bool = False

    def __post_init__(self) -> None:
        self.scale = self.number(self.scale)
        self.left = self.rule.hysteresis

    def step(self, overflow: bool, first: bool = True) -> None:
        """An optimizer step; first: since the last forward."""
        if first:
            self.hit = False
        if overflow:
            self.skipped += 1
        if self.rule.kind != "dynamic":
            return
        if overflow and not self.hit:
            self.hit = True
            self._overflowed()
        elif first and not overflow:
            self._went_well()

    def _overflowed(self) -> None:
        number, rule = self.number, self.rule
        if self.scale <= number(rule.min_scale):
            self.floor = True
        self.good = 0
        self.left -= 1
        if self.left == 0:
            self.scale = self.scale * number(rule.backoff_factor)
            if self.scale < rule.min_scale:
                self.scale = number(rule.min_scale)
            self.left = rule.hysteresis

    def _went_well(self) -> None:
        number, rule = self.number, self.rule
        self.good += 1
        if self.good == rule.growth_interval:
            self.scale = self.scale * number(rule.growth_factor)
            if self.scale > rule.max_scale:
                self.scale = number(rule.max_scale)
            self.good, self.left = 0, rule.hysteresis

    def numbers(self) -> dict[str, Any]:
        """By the fields of `ScaleState`."""
        return {
            "scale": self.scale, "good_steps": self.good, "overflows_left": self.left,
            "skipped_steps": self.skipped, "hit": self.hit, "floor": self.floor,
        }  # fmt: skip

    def saved(self) -> dict[str, Any]:
        """Those that a checkpoint keeps."""
        return {k: v for k, v in self.numbers().items() if k not in ("hit", "floor")}


RULES = st.builds(
    ScaleRule,
    kind=st.sampled_from(["dynamic", "dynamic", "dynamic", "static"]),
    growth_factor=st.sampled_from([2.0, 4.0, 1.5, 1.001]),
    backoff_factor=st.sampled_from([0.5, 0.25, 0.7]),
    growth_interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    min_scale=st.sampled_from([2.0**-14, 0.1, 0.5, 1.0]),
    max_scale=st.sampled_from([1024.0, 3000.0, 2.0**24]),
)
STARTS = st.sampled_from([1.0, 4.0, 1000.0])
# Steps: did it overflow, is it the first after a forward.
STEPS = st.lists(
    st.tuples(st.sampled_from([False, False, True]), st.sampled_from([True, True, False])),
    max_size=40,
)
