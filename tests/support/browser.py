"""Headless Chromium without a network, for the tests of pages and for their pictures."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
          "--window-size=1500,950", "--host-resolver-rules=MAP * ~NOTFOUND")  # fmt: skip


@contextlib.contextmanager
def browser(*flags: str) -> Iterator[Any]:
    """A selenium driver; it logs the console and every request, and resolves no host name."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_FLAGS, *flags):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(CHROMEDRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """A browser, where there is one and selenium to drive it."""
    pytest.importorskip("selenium")
    if not (CHROMIUM and CHROMEDRIVER):
        pytest.skip("no chromium with chromedriver")
    with browser() as made:
        yield made


def opened(driver: Any, path: Path) -> Any:
    """The driver at a file, by file://."""
    driver.get("about:blank")  # a change of the fragment alone would not load it again
    driver.get(path.resolve().as_uri())
    return driver


class Reader:
    """A person before the page of a plan or of a report, who counts the clicks."""

    def __init__(self, driver: Any, shown: Any, path: Path) -> None:
        self.driver, self.shown, self.clicks = opened(driver, path), shown, 0

    def click(self, css: str) -> None:
        self._use(css, lambda one: one.click())
        self.clicks += 1

    @property
    def panel(self) -> str:
        text: str = self._use("#panel", lambda one: one.text)
        return text

    def _use(self, css: str, use: Callable[[Any], Any]) -> Any:
        """What `use` gives of an element, found again where the page draws it anew meanwhile."""
        from selenium.common.exceptions import StaleElementReferenceException

        for _ in range(4):
            with contextlib.suppress(StaleElementReferenceException):
                return use(self.driver.find_element("css selector", css))
        return use(self.driver.find_element("css selector", css))


def console(driver: Any) -> list[str]:
    """What has come to stand in the console, which the driver hears of a little later.

    Messages come in order, so a last one of our own says that all before it were heard.
    """
    driver.execute_script("console.info('the last one')")
    heard: list[str] = []
    for _ in range(100):
        heard += [entry["message"] for entry in driver.get_log("browser")]
        if heard and "the last one" in heard[-1]:
            return heard[:-1]
        time.sleep(0.1)
    raise AssertionError(f"the console is silent; it said {heard}")


@contextlib.contextmanager
def undisturbed(driver: Any) -> Iterator[None]:
    """In this context nothing may come to stand in the console, and nothing be asked for."""
    driver.get_log("performance")
    yield
    assert console(driver) == []
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    asked = {
        message["params"]["request"]["url"].partition(":")[0]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    }
    assert asked <= {"file"}


def written(folder: Path, made: Mapping[str, Callable[[], Any]]) -> dict[str, tuple[Any, Path]]:
    """Plans or reports by name, each with its page."""
    pages = {name: (make(), folder / f"{name}.html") for name, make in made.items()}
    for one, path in pages.values():
        one.to_html(path)
    return pages


WIDTHS = (800, 1400, 2000)
"""Those at which pages are looked at."""

_WIDER_THAN_IT_SHOWS = """
return [...document.querySelectorAll('body *')].filter((one) => one instanceof HTMLElement
  && one.checkVisibility() && one.clientWidth && one.scrollWidth > one.clientWidth + 1
  && getComputedStyle(one).textOverflow !== 'ellipsis').map((one) => one.outerHTML)
"""


def cut_at(driver: Any, width: int, path: Path) -> list[str]:
    """What is wider than it shows, so cut or scrolled, on the page in a window of this width.

    The page must also have no hole in a row of cards: the last one reaches the right margin.
    """
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened(driver, path)
        cards = [card.rect for card in driver.find_elements("css selector", ".cards > *")]
        for y in {card["y"] for card in cards}:
            assert max(one["x"] + one["width"] for one in cards if one["y"] == y) > width - 50
        return driver.execute_script(_WIDER_THAN_IT_SHOWS)
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
