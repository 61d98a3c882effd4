"""The page of a plan in headless Chromium, from file:// and without a network."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser
import page_plans
import pytest
from browser import driver as driver

from mpcompile.planner.min_cut import NEVER
from mpcompile.planner.plan_data import PlanNode
from mpcompile.plans.model_plan import Plan

pytest.importorskip("selenium")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

PLANS: dict[str, Callable[[], Plan]] = {
    "gpt": page_plans.gpt_plan,
    "resnet": page_plans.resnet_plan,
    "evil": page_plans.evil_plan,
    "long": page_plans.long_plan,
    "mixed": page_plans.mixed_plan,
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Plan, Path]]:
    return browser.written(tmp_path_factory.mktemp("pages"), PLANS)


class Reader(browser.Reader):
    def all(self, css: str) -> list[Any]:
        return [
            one for one in self.driver.find_elements(By.CSS_SELECTOR, css) if one.is_displayed()
        ]

    def search(self, text: str) -> None:
        box = self.driver.find_element(By.ID, "search")
        box.clear()
        box.send_keys(text)

    def rows(self, name: str = "data-key") -> list[str]:
        """An attribute of every row, read at once."""
        found: list[str] = self.driver.execute_script(
            "return [...document.querySelectorAll('#rows .row')]"
            ".map((row) => row.getAttribute(arguments[0]))",
            name,
        )
        return found


@pytest.fixture
def read(driver: Any, plans: dict[str, tuple[Plan, Path]]) -> Iterator[Callable[[str], Reader]]:
    with browser.undisturbed(driver):
        yield lambda name: Reader(driver, *plans[name])


def last_full(plan: Plan, op: str) -> PlanNode:
    return [node for node in plan.nodes if node.op == op and node.precision == "FULL"][-1]


# -- why is this FP32? -----------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "op"), [("gpt", "aten::softmax"), ("resnet", "aten::batch_norm")])
def test_why_is_this_fp32_in_two_clicks(read: Callable[[str], Reader], page: str, op: str) -> None:
    """By the precision, and by the module."""
    node = last_full(read(page).shown, op)
    name = node.name
    for first in ("[data-kind='FULL']", f"#tree [data-path='{node.module}']"):
        reader = read(page)
        if not reader.all(first):
            reader.click("#open-all")
            reader.clicks = 0
        reader.click(first)
        reader.click(f".row[data-key='0/{name}']")
        assert reader.clicks == 2
        assert reader.panel.startswith(f"FULL\n{name}\n")
        assert node.reason in reader.panel
        assert node.change in reader.panel


def test_the_panel_tells_all(read: Callable[[str], Reader]) -> None:
    reader = read("resnet")
    (node,) = (node for node in reader.shown.nodes if node.name == "conv2d_1")
    backward = [n.name for n in reader.shown.graphs[0].backward if n.forward == "conv2d_1"]
    assert backward
    reader.click("[data-kind='LOW']")
    reader.click(".row[data-key='0/conv2d_1']")
    assert "not in the program" not in reader.panel
    for text in (node.reason, node.op, node.module, node.source, node.captured, node.planned,
                 *node.frames, *backward, "TENSOR CORES", "as captured"):  # fmt: skip
        assert text in reader.panel, text
    (line,) = (line for line in reader.shown.graphs[0].after if line.name == node.name)
    links = {link.text.partition(":")[0]: link for link in reader.all("#panel li .link")}
    assert set(line.reads) <= set(links)
    reader = read("resnet")
    graph = reader.shown.graphs[0]
    one = next(x for x in graph.weighed(n.name for n in graph.nodes) if 0 < x.totals[1] < NEVER)
    reader.click(f".row[data-key='0/{one.name}']")
    assert "WHAT THE PLANNER WEIGHED" in reader.panel
    (total,) = (x for x in graph.why(one.name).splitlines() if x.startswith("  together"))
    assert total.split() in [line.split() for line in reader.panel.splitlines()]


def test_links_lead_to_operands_and_back(read: Callable[[str], Reader]) -> None:
    reader = read("resnet")
    reader.click(".row[data-key='0/batch_norm_19']")
    reader.click("#panel li .link")
    WebDriverWait(reader.driver, 10).until(lambda _: "cast\nconv2d_19_f32\n" in reader.panel)
    reader.driver.back()
    WebDriverWait(reader.driver, 10).until(lambda _: "FULL\nbatch_norm_19\n" in reader.panel)


# -- finding nodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["decisions", "graph", "backward"])
def test_search(read: Callable[[str], Reader], view: str) -> None:
    reader = read("gpt")
    reader.click(f"#tab-{view}")
    wanted = {f"0/{n.name}" for n in reader.shown.nodes if "softmax" in n.name + n.reason + n.op}
    of_program = {f"0/{n.name}" for n in reader.shown.nodes if not n.is_added}
    reader.search("softmax")
    found = {key for key in reader.rows() if key}
    assert found == (wanted & of_program if view == "backward" else wanted)
    one = last_full(reader.shown, "aten::softmax")
    reader.search(f"SOFTMAX {one.module}")
    fewer = {key for key in reader.rows() if key}
    assert f"0/{one.name}" in fewer < found
    reader.search(f"softmax {one.module} nothing")
    assert {key for key in reader.rows() if key} == set()


def test_filters_by_rule_and_precision(read: Callable[[str], Reader]) -> None:
    reader = read("resnet")
    reader.click("#rule option[value='cast']")
    casts = [f"0/{n.name}" for n in reader.shown.nodes if n.rule == "cast"]
    assert casts
    assert reader.rows() == casts
    reader.click("[data-kind='LOW']")
    assert reader.rows() == []
    assert "Nothing matches" in reader.driver.find_element(By.ID, "rows").text


def test_counters_are_under_keep(read: Callable[[str], Reader]) -> None:
    """And a search finds them; that of a batch norm is not beside it."""
    reader = read("resnet")
    counters = [f"0/{n.name}" for n in reader.shown.nodes if n.op == "aten::add_"]
    assert len(counters) == 20
    assert not set(counters) & set(reader.rows())
    reader.click("#tree [data-path='stem']")
    assert not set(counters) & set(reader.rows())
    reader.click("#module-filter button")
    reader.click("[data-kind='KEEP']")
    assert reader.rows() == counters
    reader.click("[data-kind='ALL']")
    reader.search("aten::add_")
    assert reader.rows() == counters


def test_the_costliest_product_in_fp32_is_open(read: Callable[[str], Reader]) -> None:
    """Where there is one, and the address names no other; the page is at its top."""
    reader = read("mixed")
    (full,) = (n for n in reader.shown.nodes if n.op == "aten::linear" and n.precision == "FULL")
    assert reader.panel.startswith(f"FULL\n{full.name}\n")
    assert [row.get_attribute("data-key") for row in reader.all(".row.chosen")] == [
        f"0/{full.name}"
    ]
    assert reader.driver.execute_script("return scrollY") == 0
    reader.click("#panel .top button")
    assert reader.panel.startswith("Why is")
    assert read("resnet").panel.startswith("Why is")  # all of its products are low


@pytest.mark.parametrize("name", ["gpt", "resnet", "mixed"])
@pytest.mark.parametrize("width", browser.WIDTHS)
def test_nothing_is_cut(
    driver: Any, plans: dict[str, tuple[Plan, Path]], name: str, width: int
) -> None:
    assert browser.cut_at(driver, width, plans[name][1]) == []


def test_modules_fold(read: Callable[[str], Reader]) -> None:
    reader = read("gpt")

    def paths() -> list[str]:
        return [row.get_attribute("data-path") for row in reader.all("#tree li")]

    everything = [module.path for module in reader.shown.modules]
    assert paths() == everything
    reader.click("[data-path='blocks.1'] .fold")
    assert paths() == [p for p in everything if not p.startswith("blocks.1.")]
    assert reader.driver.find_element(By.ID, "module-filter").is_displayed() is False
    reader.click("#close-all")
    assert paths() == [p for p in everything if "." not in p]
    reader.click("#open-all")
    assert paths() == everything


def test_a_module_shows_its_nodes(read: Callable[[str], Reader]) -> None:
    reader = read("gpt")
    reader.click("#tree [data-path='blocks.1']")
    inside = [n for n in reader.shown.nodes if f"{n.module}.".startswith("blocks.1.")]
    assert reader.rows() == [f"0/{n.name}" for n in inside]
    reader.click("#tab-backward")
    assert reader.rows() == [f"0/{n.name}" for n in reversed(inside) if not n.is_added]
    reader.click("#module-filter button")
    assert len(reader.rows()) == len(reader.shown.graphs[0].backward)


def test_a_mixed_module_shows_its_mixture(read: Callable[[str], Reader]) -> None:
    reader = read("resnet")
    reader.click("#open-all")
    inside = [
        n for n in reader.shown.nodes
        if n.module.startswith("stages.7") and not n.is_added and n.op != "aten::add_"
    ]  # fmt: skip
    wide = reader.all("[data-path='stages.7'] .mix")[0].rect["width"]
    for kind in ("LOW", "FULL"):
        count = sum(node.precision == kind for node in inside)
        assert count
        (part,) = reader.all(f"[data-path='stages.7'] .mix .{kind}")
        assert part.rect["width"] == pytest.approx(wide * count / len(inside), abs=1)


def test_by_keyboard_alone(read: Callable[[str], Reader]) -> None:
    reader = read("gpt")
    keys = reader.driver.switch_to.active_element
    keys.send_keys("/")
    box = reader.driver.switch_to.active_element
    assert box.get_attribute("id") == "search"
    box.send_keys("softmax")
    first, second = reader.rows()[:2]
    reader.driver.execute_script("document.querySelector('#rows [tabindex=\"0\"]').focus()")
    reader.driver.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    reader.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert second.removeprefix("0/") in reader.panel.splitlines()
    assert reader.driver.switch_to.active_element.get_attribute("id") == "panel"
    reader.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    row = reader.driver.switch_to.active_element
    assert row.get_attribute("data-key") == second != first
    tree = reader.driver.find_element(By.CSS_SELECTOR, "#tree [data-path='blocks']")
    reader.driver.execute_script("arguments[0].focus()", tree)
    tree.send_keys(Keys.ARROW_LEFT)
    assert not reader.all("#tree [data-path='blocks.0']")
    assert tree.get_attribute("aria-expanded") == "false"


# -- the graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["gpt", "resnet"])
def test_before_and_after_stand_side_by_side(read: Callable[[str], Reader], page: str) -> None:
    reader = read(page)
    reader.click("#tab-graph")
    while folds := reader.all("#rows .row.gap"):
        folds[0].click()
    (graph,) = reader.shown.graphs
    left, right = reader.rows("data-before"), reader.rows("data-after")
    assert [name for name in left if name] == [line.name for line in graph.before]
    assert [name for name in right if name] == [line.name for line in graph.after]
    assert all(b == a for b, a in zip(left, right, strict=True) if a and b)
    names = {name: index for index, name in enumerate(left)}
    assert all(node.name not in names for node in graph.nodes if node.is_added)
    removed = [b for b, a in zip(left, right, strict=True) if not a]
    attentions = [b for b in left if b.startswith("scaled_dot_product_attention")]
    assert removed == attentions  # the CPU has them written out
    assert len(attentions) == (4 if page == "gpt" else 0)
    name = next(node.name for node in graph.nodes if node.precision == "LOW" and node.name in names)
    row = reader.driver.find_element(By.CSS_SELECTOR, f"[data-after='{name}']")
    before, after = (row.find_element(By.CSS_SELECTOR, f".{side}") for side in ("before", "after"))
    assert before.rect["y"] == after.rect["y"]
    assert before.rect["x"] + before.rect["width"] <= after.rect["x"]
    texts = [{x.name: x.text for x in lines}[name] for lines in (graph.before, graph.after)]
    assert [before.text, after.text] == texts


def test_backward(read: Callable[[str], Reader]) -> None:
    reader = read("gpt")
    reader.click("#tab-backward")
    assert len(reader.rows()) == len(reader.shown.graphs[0].backward)
    name = last_full(reader.shown, "aten::softmax").name
    reader.click(f".row[data-key='0/{name}']")
    assert reader.panel.startswith(f"FULL\n{name}\n")
    assert reader.driver.find_element(By.CSS_SELECTOR, ".row.chosen b").text == f"{name}_backward"
    reader.click("#tab-decisions")
    link = "//h3[text()='Backward']/following-sibling::ul[1]//button"
    reader.driver.find_element(By.XPATH, link).click()
    assert [key for key in reader.rows() if key] == [f"0/{name}"]


def test_several_graphs(read: Callable[[str], Reader]) -> None:
    reader = read("evil")
    text = reader.driver.find_element(By.ID, "rows").text
    assert f"graph 2, left in FP32: {page_plans.EVIL}" in text
    assert f"the graph ends here: {page_plans.EVIL}" in text
    reader.click("#graph option[value='1']")
    assert "linear" not in reader.driver.find_element(By.ID, "rows").text


def test_thousands_of_nodes(read: Callable[[str], Reader]) -> None:
    """The first 3000 rows stand there at once, the others behind a button."""
    reader = read("long")
    keys = [f"{number}/{n.name}" for number, graph in enumerate(reader.shown.graphs)
            for n in graph.nodes if not n.is_added and n.op != "aten::add_"]  # fmt: skip
    assert len(keys) > 3000
    shown = [key for key in reader.rows() if key]
    assert len(shown) < 3000
    assert shown == keys[: len(shown)]
    reader.click("#rows .gap:last-child")
    assert reader.rows() == keys


def test_the_address_names_a_node(read: Callable[[str], Reader]) -> None:
    reader = read("resnet")
    for fragment, start in (("0%2Flinear", "LOW\nlinear\n"), ("%", "Why is"), ("0%2Fno", "Why is")):
        reader.driver.execute_script("location.hash = arguments[0]", fragment)
        reader.driver.refresh()
        assert reader.panel.startswith(start)


# -- safety ----------------------------------------------------------------------------------------


def test_no_name_becomes_markup(read: Callable[[str], Reader]) -> None:
    """The fixture fails on an alert's or a forbidden handler's message in the console."""
    reader = read("evil")
    reader.click("[data-kind='LOW']")
    reader.click(".row[data-key='0/linear']")
    assert page_plans.EVIL in reader.panel
    reader.click("#tab-graph")
    reader.click("#tab-backward")
    for tree in reader.all("#tree li"):
        tree.click()
    assert reader.driver.find_elements(By.TAG_NAME, "img") == []


def test_an_injected_request_is_refused(
    driver: Any, plans: dict[str, tuple[Plan, Path]], tmp_path: Path
) -> None:
    """That the tests above would see one: the console says that the page's policy forbids it."""
    page = tmp_path / "injected.html"
    html = plans["resnet"][1].read_text(encoding="utf-8")
    page.write_text(html.replace("</main>", "</main><img src='https://example.com/x.png'>"))
    browser.opened(driver, page)
    (message,) = browser.console(driver)
    assert "Content Security Policy" in message
