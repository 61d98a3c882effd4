"""The histogram of activation gradients: its ranges, its axes, and its drawing."""

from __future__ import annotations

import math

import pytest
import torch
from reports import histogram

from mpcompile.diagnosis.histogram import RANGES, Chart, chart_of, range_of
from mpcompile.diagnosis.histogram_svg import drawing_of
from mpcompile.observe.numbers import EXPONENTS

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
    assert range_of(exponent + 0.5) == fate(1.5 * 2.0**exponent) == fate(1.001 * 2.0**exponent)


def test_ranges_adjoin() -> None:
    assert [one.stop for one in RANGES[:-1]] == [one.start for one in RANGES[1:]]


def test_percentages() -> None:
    """By hand, of 40."""
    chart = chart_of(histogram(COUNTS), ZEROS, None)
    (panel,) = chart.panels
    assert chart.zeros == 32.5
    assert [(bar.left, bar.percent) for bar in panel.bars] == [
        (exponent, 100 * count / 40) for exponent, count in COUNTS.items()
    ]
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
        assert after.range == fate(1.5 * 2.0**exponent * scale)
    assert f"{scale:g}" in scaled.title


def test_a_scale_of_one_is_none() -> None:
    assert len(chart_of(histogram(COUNTS), ZEROS, 1.0).panels) == 1


@pytest.mark.parametrize("counts", [COUNTS, {-80: 1}, {64: 1}, {0: 10**9, 1: 1}, {}])
def test_everything_is_on_the_chart(counts: dict[int, int]) -> None:
    chart = chart_of(histogram(counts), 1, 2.0**16)
    for panel in chart.panels:
        for bar in panel.bars:
            assert chart.low < bar.left
            assert bar.left + 1 < chart.high
            assert 0 < chart.height(bar.percent) <= 1
    assert chart.low < -25 < 16 < chart.high
    assert all(chart.low + 3 <= tick <= chart.high and tick % 5 == 0 for tick in chart.ticks)
    assert chart.ticks[0] - 5 < chart.low + 3
    assert chart.ticks[-1] + 5 > chart.high
    assert 0 < chart.height(chart.zeros) <= 1
    assert chart.height(100) == 1
    assert chart.height(chart.decades[-1]) == 0


def test_heights_are_logarithmic() -> None:
    chart = chart_of(histogram({0: 999}), 1, None)  # 0.1 percent are zero: down to 0.01
    assert chart.decades == (100, 10, 1, 0.1, 0.01)
    heights = [chart.height(decade) for decade in chart.decades]
    assert heights == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert chart_of(histogram({0: 1}), 0, None).height(0) == 0  # no zeros


# -- the drawing on the page -----------------------------------------------------------------------


def drawn(chart: Chart) -> list[tuple[float, float, float]]:
    """Left end, height and width of each bar; zeros last."""
    drawing = drawing_of(chart, chart.panels[0])
    for bar in drawing.bars:
        assert bar.y + bar.height == pytest.approx(drawing.bottom)
        assert drawing.left <= bar.x <= bar.x + bar.width <= drawing.right
    return [(bar.x, bar.height, bar.width) for bar in drawing.bars]


def test_bars_stand_where_the_chart_says() -> None:
    chart = chart_of(histogram({-30: 10, -20: 100, 0: 1000}), 1000, None)
    drawing = drawing_of(chart, chart.panels[0])
    (x30, h30, width), (x20, h20, _), (x0, h0, _), (_, zeros, _) = drawn(chart)
    assert x0 - x20 == pytest.approx(2 * (x20 - x30), abs=0.1)
    assert width == pytest.approx(0.9 * (x0 - x20) / 20, abs=0.1)
    assert h0 - h20 == pytest.approx(h20 - h30, abs=0.1)  # each ten times the one before
    assert zeros == h0
    lost, normal, overflow = drawing.borders
    per_exponent = (x0 - x20) / 20
    assert lost == pytest.approx(x0 - 25 * per_exponent, abs=0.1)
    assert normal == pytest.approx(x0 - 14 * per_exponent, abs=0.1)
    assert overflow == pytest.approx(x0 + 16 * per_exponent, abs=0.1)
    assert drawing.right == pytest.approx(x0 + chart.high * per_exponent, abs=0.1)
    assert [bar.kind for bar in drawing.bars] == ["lost", "subnormal", "normal", "zeros"]
    texts = [label.text for label in drawing.labels]
    assert {"zero", "-25", "0", "100%"} <= set(texts)
    # By hand, of 2110, of which 1000 are zero.
    shares = {"become zero": "0.47%", "subnormal": "4.74%", "normal": "47.39%", "overflow": "0.00%"}
    assert {name: share for _, name, share in drawing.legend} == shares
