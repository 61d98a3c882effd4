"""Headless Chromium without a network, for the tests of pages and for their pictures."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")


@contextlib.contextmanager
def browser(*flags: str) -> Iterator[Any]:
    """A selenium driver; it logs the console and every request, and resolves no host name."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1500,950",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        *flags,
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(CHROMEDRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def opened(driver: Any, path: Path) -> Any:
    """The driver at a file, by file://."""
    driver.get("about:blank")  # a change of the fragment alone would not load it again
    driver.get(path.resolve().as_uri())
    return driver
