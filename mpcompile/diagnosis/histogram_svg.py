"""The histogram of activation gradients as shapes of an SVG, which the page's template writes."""

from __future__ import annotations

from typing import NamedTuple

from .histogram import RANGES, Chart, Panel
from .report_text import percent

WIDTH, HEIGHT = 720, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, WIDTH - 8, 10, HEIGHT - 30
_CLASSES = {
    "become zero": "lost", "subnormal": "subnormal", "normal": "normal", "overflow": "lost"
}  # fmt: skip


class Rectangle(NamedTuple):
    """A bar: its place and size, its class, and what it says when pointed at."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str


class Label(NamedTuple):
    """A text at a place; `anchor` is the part of it that lies there: "middle" or "end"."""

    x: float
    y: float
    text: str
    anchor: str = "middle"


class Drawing(NamedTuple):
    """One panel.

    `legend` has the class, name and share of each range; `levels` are heights of horizontal lines,
    `borders` places of vertical ones.
    """

    title: str
    legend: list[tuple[str, str, str]]
    bars: list[Rectangle]
    labels: list[Label]
    levels: list[float]
    borders: list[float]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = _LEFT
    right: float = _RIGHT
    top: float = _TOP
    bottom: float = _BOTTOM


def drawing_of(chart: Chart, panel: Panel) -> Drawing:
    first, last = chart.low - 3, chart.high

    def x(place: float) -> float:
        return round(_LEFT + (place - first) / (last - first) * (_RIGHT - _LEFT), 2)

    def y(share: float) -> float:
        return round(_TOP + (1 - chart.height(share)) * (_BOTTOM - _TOP), 2)

    def bar(left: float, right: float, share: float, kind: str, what: str) -> Rectangle:
        top, width = y(share), round(x(right) - x(left), 2)
        return Rectangle(x(left), top, width, _BOTTOM - top, kind, f"{what}: {share:.3g}%")

    bars = [
        bar(one.left, one.left + 0.9, one.percent, _CLASSES[one.range],
            f"2^{one.left:g} to 2^{one.left + 1:g}, {one.range}")
        for one in panel.bars
    ]  # fmt: skip
    bars.append(bar(chart.low - 2.5, chart.low - 1, chart.zeros, "zeros", "zero"))
    labels = [
        *(Label(_LEFT - 6, y(decade) + 4, f"{decade:g}%", "end") for decade in chart.decades[::2]),
        Label(x(chart.low - 1.75), _BOTTOM + 16, "zero"),
        *(Label(x(place), _BOTTOM + 16, str(place)) for place in chart.ticks),
    ]
    legend = [
        (_CLASSES[one.name], one.name, percent(panel.percent(one.name) / 100)) for one in RANGES
    ]
    levels, borders = [y(decade) for decade in chart.decades], [x(one.start) for one in RANGES[1:]]
    return Drawing(panel.title, legend, bars, labels, levels, borders)
