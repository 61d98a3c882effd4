"""The histogram of activation gradients by binary exponent, and what FP16 makes of each.

As figure 3 of "Mixed Precision Training" (Micikevicius et al., ICLR 2018): percent of all elements,
on a logarithmic axis, over floor(log2 |x|), zeros at the left. `page.html` draws a `HistogramChart`
as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..observe.record import EXPONENTS

_FP16 = torch.finfo(torch.float16)
_SMALLEST_NORMAL = int(math.log2(_FP16.smallest_normal))  # -14
# Half of the smallest FP16 number, 2**-24, rounds to zero; what is larger rounds to that number.
_ROUNDS_TO_ZERO = int(math.log2(_FP16.smallest_normal * _FP16.eps)) - 1  # -25
_OVERFLOWS = math.ceil(math.log2(_FP16.max))  # 16


class Range(NamedTuple):
    """What FP16 makes of magnitudes from 2**start up to 2**stop; `style` is its class on a page."""

    name: str
    start: float
    stop: float
    style: str


RANGES = (
    Range("become zero", -math.inf, _ROUNDS_TO_ZERO, "lost"),
    Range("subnormal", _ROUNDS_TO_ZERO, _SMALLEST_NORMAL, "subnormal"),
    Range("normal", _SMALLEST_NORMAL, _OVERFLOWS, "normal"),
    Range("overflow", _OVERFLOWS, math.inf, "lost"),
)


@dataclass(frozen=True)
class Bar:
    """The elements from 2**left up to 2**(left + 1).

    Attributes:
        left: log2 of the smallest magnitude, after multiplication by the loss scale.
        percent: of all elements, zeros included.
    """

    left: float
    percent: float

    @property
    def range(self) -> Range:
        """The range in which its middle lies."""
        return next(one for one in RANGES if one.start <= self.left + 0.5 < one.stop)


@dataclass(frozen=True)
class Panel:
    """The histogram at one loss scale.

    Attributes:
        title: what the magnitudes are multiplied by.
        bars: without empty ones, from small to large.
    """

    title: str
    bars: tuple[Bar, ...]

    def percent(self, range: str) -> float:
        """Of all elements, how many lie in the range of this name."""
        return sum(bar.percent for bar in self.bars if bar.range.name == range)


@dataclass(frozen=True)
class HistogramChart:
    """What is drawn, in units of an SVG of `width` times `height`.

    Attributes:
        panels: the gradients as they are and, if a loss scale is in use, multiplied by it.
        zeros: percent of all elements.
        low, high: log2 of the ends of the axis.
        decades: the percentages at which the vertical axis has lines: 100, 10, ..., the bottom.
        left, right, top, bottom: the edges of the axes.
    """

    panels: tuple[Panel, ...]
    zeros: float
    low: int
    high: int
    decades: tuple[float, ...]
    width: int = 720
    height: int = 190
    left: int = 58
    right: int = 712
    top: int = 10
    bottom: int = 160

    @property
    def ticks(self) -> range:
        """The exponents that are written below the axis, clear of the bar of zeros and of one
        another: a label takes some 30 units.
        """
        step = 5 * math.ceil(36 * (self.high - self.low + 3) / (self.right - self.left) / 5)
        return range(-step * (-(self.low + 3) // step), self.high + 1, step)

    def x(self, place: float) -> float:
        """Where an exponent is; the bar of zeros stands below `low`."""
        first = self.low - 3
        return self.left + (place - first) / (self.high - first) * (self.right - self.left)

    def y(self, percent: float) -> float:
        """Where a percentage is on the vertical axis, which ends with the last of `decades`."""
        last = math.log10(self.decades[-1])
        share = (math.log10(percent) - last) / (2 - last) if percent else 0.0
        return self.top + (1 - share) * (self.bottom - self.top)


def chart_of(counts: Sequence[int], zeros: int, scale: float | None) -> HistogramChart:
    """Make the chart of a histogram.

    Args:
        counts: elements by binary exponent, one for each of `EXPONENTS`.
        zeros: how many elements are zero.
        scale: the loss scale; None for none.
    """
    total = sum(counts) + zeros
    panels = [_panel("activation gradients", counts, total, 0.0)]
    if scale is not None and scale != 1:
        title = f"activation gradients times the loss scale, {scale:g}"
        panels.append(_panel(title, counts, total, math.log2(scale)))
    lefts = [bar.left for panel in panels for bar in panel.bars]
    smallest = min((100 * n / total for n in (*counts, zeros) if n), default=100.0)
    bottom = min(-1, math.ceil(math.log10(smallest)) - 1)
    return HistogramChart(
        tuple(panels),
        100 * zeros / total,
        low=math.floor(min([*lefts, _ROUNDS_TO_ZERO])) - 5,
        high=math.ceil(max([*lefts, _OVERFLOWS])) + 7,
        decades=tuple(10.0**place for place in range(2, bottom - 1, -1)),
    )


def _panel(title: str, counts: Sequence[int], total: int, shift: float) -> Panel:
    pairs = zip(EXPONENTS, counts, strict=True)
    return Panel(title, tuple(Bar(e + shift, 100 * count / total) for e, count in pairs if count))
