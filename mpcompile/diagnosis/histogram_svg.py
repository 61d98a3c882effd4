"""The histogram of activation gradients as shapes of an SVG, which the page's template writes."""

from __future__ import annotations

from typing import NamedTuple

from .histogram import RANGES, Chart, Panel

WIDTH, HEIGHT = 1000, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, WIDTH - 8, 40, HEIGHT - 30
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
    """A text at a place; `anchor` is the part of it that lies there: "start", "middle", "end"."""

    x: float
    y: float
    text: str
    anchor: str = "middle"
    kind: str = "tick"


class Drawing(NamedTuple):
    """One panel. `levels` are heights of horizontal lines, `borders` places of vertical ones."""

    title: str
    bars: list[Rectangle]
    labels: list[Label]
    levels: list[float]
    borders: list[float]
    left: float = _LEFT
    right: float = _RIGHT
    top: float = _TOP
    bottom: float = _BOTTOM


def drawing_of(chart: Chart, panel: Panel) -> Drawing:
    first, last = chart.low - 3, chart.high

    def x(place: float) -> float:
        return round(_LEFT + (place - first) / (last - first) * (_RIGHT - _LEFT), 2)

    def y(percent: float) -> float:
        return round(_TOP + (1 - chart.height(percent)) * (_BOTTOM - _TOP), 2)

    def bar(left: float, right: float, percent: float, kind: str, what: str) -> Rectangle:
        top, width = y(percent), round(x(right) - x(left), 2)
        return Rectangle(x(left), top, width, _BOTTOM - top, kind, f"{what}: {percent:.3g}%")

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
    for one in RANGES:
        middle = (x(max(one.start, chart.low)) + x(min(one.stop, chart.high))) / 2
        labels.append(Label(middle, 14, one.name, kind="range"))
        labels.append(Label(middle, 30, f"{panel.percent(one.name):.3g}%", kind="range"))
    levels, borders = [y(decade) for decade in chart.decades], [x(one.start) for one in RANGES[1:]]
    return Drawing(panel.title, bars, labels, levels, borders)
