"""Takes the pictures in docs/figures/ of the pages of a plan and of a report, by
`python tests/support/plan_pictures.py`.

Needs selenium, Chromium and chromedriver.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from browser import browser, opened

from benchmarks.models import resnet18
from mpcompile import diagnose, plan_for
from mpcompile.demo.gpt import GPT, GPTConfig
from mpcompile.diagnosis.report import Report

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def main() -> None:
    tokens = torch.zeros(8, 128, dtype=torch.int64)
    images, targets = torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.int64)
    plans = {
        "gpt": plan_for(GPT(GPTConfig()), tokens, tokens, device="t4"),
        "resnet": plan_for(resnet18(), images, targets, device="t4"),
    }
    with tempfile.TemporaryDirectory() as folder, browser("--window-size=1400,1000") as driver:
        for name, plan in plans.items():
            plan.to_html(Path(folder, f"{name}.html"))
        overflowing().to_html(Path(folder, "report.html"))
        opened(driver, Path(folder, "report.html"))
        click(driver, ".fault .link")
        driver.execute_script("window.scrollTo(0, 0)")
        driver.save_screenshot(FIGURES / "report_page.png")
        opened(driver, Path(folder, "gpt.html"))
        click(driver, "[data-kind='FULL']", ".row[data-key='0/embedding']")
        driver.execute_script("window.scrollTo(0, 0)")
        driver.save_screenshot(FIGURES / "plan_page.png")
        scheme = {"name": "prefers-color-scheme", "value": "dark"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        opened(driver, Path(folder, "resnet.html"))
        click(driver, "#tab-graph", "[data-path='stages.7']", ".row[data-key='0/batch_norm_19']")
        driver.execute_script("document.querySelector('main').scrollIntoView()")
        driver.save_screenshot(FIGURES / "plan_page_graph.png")


def overflowing() -> Report:
    """The demo's GPT, with a linear layer whose results FP16 can't hold."""
    torch.manual_seed(0)
    gpt, tokens = GPT(GPTConfig()), torch.randint(0, 65, (4, 128))
    with torch.no_grad():
        gpt.blocks[2].up.weight.mul_(3e5)
    return diagnose(gpt, tokens, tokens.roll(-1, 1), dtype=torch.float16)


def click(driver: Any, *selectors: str) -> None:
    for selector in selectors:
        driver.find_element("css selector", selector).click()


if __name__ == "__main__":
    main()
