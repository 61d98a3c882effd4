"""The page of a report in headless Chromium, from file:// and without a network."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
import torch
from browser import driver as driver
from module_of import module_of
from reports import EVIL, faulty, node, numbers
from torch import nn

from mpcompile import diagnose
from mpcompile.diagnosis.report import Report

pytest.importorskip("selenium")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


def overflowing() -> Report:
    """Its second layer makes 16 * 16 * 1000 of ones, which is more than FP16 holds."""
    up, down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    nn.init.constant_(up.weight, 1.0)
    nn.init.constant_(down.weight, 1000.0)
    model = module_of(lambda m, x: torch.relu(m.down(m.up(x))), up=up, down=down)
    return diagnose(model, torch.ones(8, 16), dtype=torch.float16)


def several() -> Report:
    """That of `faulty` with two nodes more."""
    made = faulty()
    add, sub = node("add"), node("sub")
    graph = dataclasses.replace(made.graphs[0], nodes=(add, *made.graphs[0].nodes, sub))
    more = numbers(add, error=1e-5, gradient_error=0.1), numbers(sub)
    return dataclasses.replace(made, nodes=(*more, *made.nodes), graphs=(graph,))


REPORTS: dict[str, Callable[[], Report]] = {
    "overflowing": overflowing,
    "faulty": faulty,
    "several": several,
    "evil": lambda: faulty(EVIL),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Report, Path]]:
    return browser.written(tmp_path_factory.mktemp("pages"), REPORTS)


class Reader(browser.Reader):
    def one(self, css: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def column(self, number: int) -> list[str]:
        """The texts of a column of the table, from top to bottom, without what is below them."""
        cells = self.driver.find_elements(By.CSS_SELECTOR, f"tbody td:nth-child({number + 1})")
        return [
            cell.text.partition("\n")[0]
            for cell in cells
            if cell.find_elements(By.XPATH, "ancestor::*[@id='rows']")
        ]


@pytest.fixture
def read(driver: Any, pages: dict[str, tuple[Report, Path]]) -> Iterator[Callable[[str], Reader]]:
    with browser.undisturbed(driver):
        yield lambda name: Reader(driver, *pages[name])


def test_from_the_fault_to_its_numbers(read: Callable[[str], Reader]) -> None:
    reader = read("overflowing")
    fault = reader.shown.first
    assert fault.node.module == "down"
    assert reader.one(".fault h2").text == "overflow"
    assert fault.node.source.startswith("test_report_browser.py:")
    assert fault.node.source in reader.one(".fault").text
    reader.click(".fault .link")
    lines = reader.panel.splitlines()
    assert lines[:2] == ["LOW", fault.node.name]
    assert f"overflow: {fault.reason}" in lines
    (numbers,) = (n for n in reader.shown.nodes if n.node == fault.node)
    assert numbers.value.infs == 8 * 16  # every element
    assert "infinite 128 0" in lines
    assert any(line.startswith("rounded to infinity 100.00%") for line in lines)
    assert reader.one("tr.chosen td").text.splitlines()[0] == fault.node.name


@pytest.mark.parametrize("name", ["overflowing", "several"])
@pytest.mark.parametrize("width", browser.WIDTHS)
def test_nothing_is_cut(
    driver: Any, pages: dict[str, tuple[Report, Path]], name: str, width: int
) -> None:
    assert browser.cut_at(driver, width, pages[name][1]) == []


def test_a_row_shows_its_numbers(read: Callable[[str], Reader]) -> None:
    reader = read("faulty")
    reader.click("tr[data-key='0/exp']")
    lines = reader.panel.splitlines()
    assert lines[1] == "exp"
    for line in (
        "elements 4 4",
        "largest magnitude 2.00 0",
        "smallest above zero 1.00 -",
        "relative error 1.0e-3 5.0e-1",
        "relative error in FP32 1.0e-7 -",
        "rounded to zero by FP16 50.00% 25.00%",
        "subnormal 0% 50.00%",
        "became zero in the run - 25.00%",
    ):
        assert line in lines, line
    reader.click("#panel .top button")
    assert reader.panel.startswith("All numbers of a node")
    reader.one("tr[data-key='0/linear_1']").send_keys(Keys.ENTER)
    assert reader.panel.splitlines()[1] == "linear_1"


def test_heads_sort(read: Callable[[str], Reader]) -> None:
    reader = read("several")
    fault = ["linear_1"]  # its row is on top, however the others are sorted
    assert reader.column(0) == [*fault, "exp", "add", "sub"]  # the largest error first
    reader.click("[data-column='2']")
    assert reader.column(0) == [*fault, "sub", "add", "exp"]
    reader.click("[data-column='0']")
    assert reader.column(0) == [*fault, "add", "exp", "sub"]
    reader.click("[data-column='0']")
    assert reader.column(0) == [*fault, "sub", "exp", "add"]
    reader.click("[data-column='3']")  # what isn't known is last
    assert reader.column(3) == ["-", "5.0e-1", "1.0e-1", "-"]
    assert reader.one("th[aria-sort='descending']").text.startswith("gradient")


def test_values_stand_beside_gradients(read: Callable[[str], Reader]) -> None:
    reader = read("faulty")
    rows = reader.driver.find_elements(By.CSS_SELECTOR, "#rows thead tr")
    groups, heads = (
        [cell.text.rstrip(" ▾") for cell in row.find_elements(By.TAG_NAME, "th")] for row in rows
    )
    named = "rounded to zero by FP16", "to infinity by FP16", "largest magnitude"
    assert groups == ["relative error", *named]
    pair = ["value", "gradient"]
    assert heads == ["node, operator", "module, source", *pair, "in FP32", *pair, *pair, *pair]
    exp = reader.driver.find_elements(By.CSS_SELECTOR, "tr[data-key='0/exp'] td")
    assert [cell.text for cell in exp[5:7]] == ["50.00%", "25.00%"]


def test_no_number_hides_what_is_not_finite(read: Callable[[str], Reader]) -> None:
    """By hand: all values are infinite, so none has an error; the mean of 128 of them has the
    gradient 1 / 128, times the loss scale.
    """
    reader = read("overflowing")
    wide = reader.driver.find_elements(By.CSS_SELECTOR, "tr[data-key='0/linear_1'] td")
    assert [cell.text for cell in wide[2:4]] == ["-", "0"]
    assert [cell.text for cell in wide[9:]] == ["∞", f"{reader.shown.scale / 128:.3f}"]
    assert reader.column(0)[0] == "linear_1"
    cards = reader.one(".cards").text
    assert "no scale makes a forward finite" in cards
    assert "fits" not in cards


def test_search(read: Callable[[str], Reader]) -> None:
    reader = read("overflowing")
    total = len(reader.shown.nodes)
    assert reader.one("#status").text == f"{total} of {total} nodes"
    reader.one("body").send_keys("/")
    reader.driver.switch_to.active_element.send_keys("RELU")
    lines = [n.node for n in reader.shown.nodes]
    wanted = [n.name for n in lines if "relu" in f"{n.name} {n.op} {n.reason}"]
    assert 0 < len(wanted) < total
    assert sorted(reader.column(0)) == sorted(wanted)
    assert reader.one("#status").text == f"{len(wanted)} of {total} nodes"
    reader.driver.switch_to.active_element.send_keys(" nowhere")
    assert reader.column(0) == []


def test_updates(read: Callable[[str], Reader]) -> None:
    reader = read("faulty")
    reader.click("#tab-updates")
    assert [reader.column(i) for i in range(3)] == [
        ["weight", "bias"], ["75.00%", "0%"], ["1.0e-5", "5.0e-1"],
    ]  # fmt: skip
    assert reader.one("#tab-updates").get_attribute("aria-selected") == "true"
    reader.click("#tab-numbers")
    assert len(reader.column(0)) == 2


def test_the_histogram_is_seen(read: Callable[[str], Reader]) -> None:
    reader = read("faulty")
    bars = reader.driver.find_elements(By.CSS_SELECTOR, ".histogram rect")
    assert len(bars) == 10
    assert all(bar.size["height"] > 1 and bar.size["width"] > 1 for bar in bars)
    colours = {
        kind: reader.one(f".histogram rect.{kind}").value_of_css_property("fill")
        for kind in ("lost", "subnormal", "normal", "zeros")
    }
    assert len(set(colours.values())) == 4


def test_an_evil_name_is_text(read: Callable[[str], Reader]) -> None:
    reader = read("evil")
    reader.click(".fault .link")
    assert EVIL in reader.panel
    assert EVIL in reader.one(".fault").text
    assert reader.driver.find_elements(By.TAG_NAME, "img") == []
