"""The histogram of activation gradients as shapes of an SVG, which the template writes out."""

from __future__ import annotations

from dataclasses import dataclass

from ..histogram import RANGES, Chart, Panel

WIDTH, HEIGHT = 1000, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 40, 30
_CLASSES = {
    "become zero": "lost", "subnormal": "subnormal", "normal": "normal", "overflow": "lost"
}  # fmt: skip


@dataclass(frozen=True)
class Rectangle:
    """A bar: its place and size, its class, and what it says when pointed at."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str


@dataclass(frozen=True)
class Label:
    """A text at a place; `anchor` is the part of it that lies there: "start", "middle", "end"."""

    x: float
    y: float
    text: str
    anchor: str = "middle"
    kind: str = "tick"


@dataclass(frozen=True)
class Drawing:
    """One panel. `levels` are heights of horizontal lines, `borders` places of vertical ones."""

    title: str
    bars: tuple[Rectangle, ...]
    labels: tuple[Label, ...]
    levels: tuple[float, ...]
    borders: tuple[float, ...]
    right: float = WIDTH - _RIGHT
    left: float = _LEFT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


def drawing_of(chart: Chart, panel: Panel) -> Drawing:
    """Place the parts of one panel."""
    first, last = chart.low - 3, chart.high

    def x(place: float) -> float:
        inside = WIDTH - _LEFT - _RIGHT
        return round(_LEFT + (place - first) / (last - first) * inside, 2)

    def y(percent: float) -> float:
        return round(_TOP + (1 - chart.height(percent)) * (HEIGHT - _TOP - _BOTTOM), 2)

    def bar(left: float, right: float, percent: float, kind: str, what: str) -> Rectangle:
        top, base = y(percent), HEIGHT - _BOTTOM
        width = round(x(right) - x(left), 2)
        return Rectangle(x(left), top, width, round(base - top, 2), kind, f"{what}: {percent:.3g}%")

    bars = [
        bar(one.left, one.left + 0.9, one.percent, _CLASSES[one.range],
            f"2^{one.left:g} to 2^{one.left + 1:g}, {one.range}")
        for one in panel.bars
    ]  # fmt: skip
    bars.append(bar(chart.low - 2.5, chart.low - 1, chart.zeros, "zeros", "zero"))
    labels = [
        *(Label(_LEFT - 6, y(decade) + 4, f"{decade:g}%", "end") for decade in chart.decades[::2]),
        Label(x(chart.low - 1.75), HEIGHT - _BOTTOM + 16, "zero"),
        *(Label(x(place), HEIGHT - _BOTTOM + 16, str(place)) for place in chart.ticks),
    ]
    for one in RANGES:
        middle = (x(max(one.start, chart.low)) + x(min(one.stop, chart.high))) / 2
        labels.append(Label(middle, 14, one.name, kind="range"))
        labels.append(Label(middle, 30, f"{panel.percent(one.name):.3g}%", kind="range"))
    return Drawing(
        panel.title,
        tuple(bars),
        tuple(labels),
        levels=tuple(map(y, chart.decades)),
        borders=tuple(x(one.start) for one in RANGES[1:]),
    )
