"""The histogram of activation gradients: its ranges, its axes, and its drawing."""

import math
import re

import pytest
import torch
from reports import histogram, report

from mpcompile.diagnosis.histogram import RANGES, Bar, HistogramChart, chart_of
from mpcompile.diagnosis.report import render
from mpcompile.observe.record import EXPONENTS

COUNTS = {-26: 2, -25: 3, -15: 4, -14: 5, 15: 6, 16: 7}
ZEROS = 13  # 40 elements together


def fate(value: float) -> str:
    """What FP16 makes of a value, by torch's own rounding."""
    rounded = torch.tensor(value, dtype=torch.float64).to(torch.float16)
    if rounded == 0:
        return "become zero"
    if rounded.isinf():
        return "overflow"
    return "subnormal" if rounded < torch.finfo(torch.float16).tiny else "normal"


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_ranges_are_those_of_fp16(exponent: int) -> None:
    """A bar is in the range of its middle, and of what lies a little above its left edge."""
    values = 1.5 * 2.0**exponent, 1.001 * 2.0**exponent
    assert {Bar(exponent, 1.0).range.name} == set(map(fate, values))


def test_percentages() -> None:
    """By hand, of 40."""
    chart = chart_of(histogram(COUNTS), ZEROS, None)
    (panel,) = chart.panels
    assert chart.zeros == 32.5
    assert {bar.left: bar.percent for bar in panel.bars} == {e: 2.5 * n for e, n in COUNTS.items()}
    shares = {one.name: panel.percent(one.name) for one in RANGES}
    assert shares == {"become zero": 5, "subnormal": 17.5, "normal": 27.5, "overflow": 17.5}


@pytest.mark.parametrize("scale", [2.0**10, 2.0**-3, 1000.0])
def test_the_loss_scale_shifts(scale: float) -> None:
    chart = chart_of(histogram(COUNTS), ZEROS, scale)
    plain, scaled = chart.panels
    assert plain == chart_of(histogram(COUNTS), ZEROS, None).panels[0]
    for before, after, exponent in zip(plain.bars, scaled.bars, COUNTS, strict=True):
        assert after.left == before.left + math.log2(scale)
        assert after.percent == before.percent
        assert after.range.name == fate(1.5 * 2.0**exponent * scale)
    assert f"{scale:g}" in scaled.title


def test_a_scale_of_one_is_none() -> None:
    assert len(chart_of(histogram(COUNTS), ZEROS, 1.0).panels) == 1


def height(chart: HistogramChart, percent: float) -> float:
    """Of the vertical axis: 0 at the bottom, 1 at 100 percent."""
    return (chart.bottom - chart.y(percent)) / (chart.bottom - chart.top)


@pytest.mark.parametrize("counts", [COUNTS, {-80: 1}, {64: 1}, {0: 10**9, 1: 1}, {}])
def test_everything_is_on_the_chart(counts: dict[int, int]) -> None:
    chart = chart_of(histogram(counts), 1, 2.0**16)
    for panel in chart.panels:
        for bar in panel.bars:
            assert chart.low < bar.left
            assert bar.left + 1 < chart.high
            assert 0 < height(chart, bar.percent) <= 1
    assert chart.low < -25 < 16 < chart.high
    step = chart.ticks.step
    assert all(chart.low + 3 <= tick <= chart.high and tick % step == 0 for tick in chart.ticks)
    assert step % 5 == 0
    assert chart.ticks[0] - step < chart.low + 3
    assert chart.ticks[-1] + step > chart.high
    assert chart.x(step) - chart.x(0) > 30  # "-100" in letters of 11 units, and a space
    assert 0 < height(chart, chart.zeros) <= 1
    assert height(chart, 100) == 1
    assert height(chart, chart.decades[-1]) == 0


def test_heights_are_logarithmic() -> None:
    chart = chart_of(histogram({0: 999}), 1, None)  # 0.1 percent are zero: down to 0.01
    assert chart.decades == (100, 10, 1, 0.1, 0.01)
    heights = [height(chart, decade) for decade in chart.decades]
    assert heights == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert height(chart_of(histogram({0: 1}), 0, None), 0) == 0  # no zeros


# -- the drawing on the page -----------------------------------------------------------------------


def drawn(html: str, what: str) -> list[dict[str, str]]:
    """The attributes of each element of this name in the only drawing of a page."""
    (svg,) = re.findall(r'<svg class="histogram".*?</svg>', html, re.S)
    tags = re.findall(f"<{what} .*?>", svg)
    return [dict(re.findall(r'([\w-]+)="([^"]*)"', tag)) for tag in tags]


def test_bars_stand_where_the_chart_says() -> None:
    counts = histogram({-30: 10, -20: 100, 0: 1000})
    html = render(report(histogram=counts, zeros=1000, scale=None))
    chart = chart_of(counts, 1000, None)
    bars = drawn(html, "rect")
    numbers = [[float(bar[name]) for name in ("x", "y", "width", "height")] for bar in bars]
    for x, y, width, tall in numbers:
        assert y + tall == pytest.approx(chart.bottom, abs=0.02)
        assert chart.left <= x <= x + width <= chart.right
    (x30, _, width, h30), (x20, _, _, h20), (x0, _, _, h0), (_, _, _, zeros) = numbers
    assert x0 - x20 == pytest.approx(2 * (x20 - x30), abs=0.1)
    assert width == pytest.approx(0.9 * (x0 - x20) / 20, abs=0.1)
    assert h0 - h20 == pytest.approx(h20 - h30, abs=0.1)  # each ten times the one before
    assert zeros == h0
    borders = [float(line["x1"]) for line in drawn(html, "line") if line["class"] == "border"]
    per_exponent = (x0 - x20) / 20
    assert borders == pytest.approx([x0 + e * per_exponent for e in (-25, -14, 16)], abs=0.1)
    assert chart.right == pytest.approx(x0 + chart.high * per_exponent, abs=0.1)
    assert [bar["class"] for bar in bars] == ["lost", "subnormal", "normal", "zeros"]
    assert {"zero", "-25", "0", "100%"} <= set(re.findall(r"<text [^>]*>([^<]*)</text>", html))
    # By hand, of 2110, of which 1000 are zero.
    shares = {"become zero": "0.47%", "subnormal": "4.74%", "normal": "47.39%", "overflow": "0.00%"}
    assert dict(re.findall(r"</i>([a-z ]+) <b>([\d.]+%)</b>", html)) == shares
