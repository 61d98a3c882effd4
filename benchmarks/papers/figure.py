"""The loss curves of every row, with the one large that needs its loss scale, and histograms of
gradients.

`python -m benchmarks.papers.figure` draws what is committed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness.processes import ROOT
from benchmarks.harness.report import RESULTS

from .histograms import Histogram, chart
from .tasks import ROWS
from .ways import FP32, UNSCALED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["TELLING", "draw", "draw_gradients"]

# Colour, style, width. FP32 is wide and pale, the others lie on top of it where they agree.
_LINES = {
    FP32.name: ("0.75", "-", 5.0),
    UNSCALED.name: ("tab:red", "-", 1.2),
    "FP16 O1": ("tab:blue", "-", 1.2),
    "FP16 O2": ("tab:blue", ":", 1.6),
    "BF16 O1": ("tab:green", "-", 1.2),
    "BF16 O2": ("tab:green", ":", 1.6),
}


Runs = dict[str, dict[str, list[dict[str, Any]]]]

# The row that does not learn without a loss scale, and what its panel is called.
TELLING = {"GPT, 2^19 tokens": "GPT with the gradients of a batch of 2^19 tokens"}
_COLUMNS = 4


def draw(path: Path, runs: Runs) -> Figure:
    """Panels of training loss, one for each task; `runs` as in the report's JSON."""
    import matplotlib as mpl  # only this function needs it
    from matplotlib.figure import Figure

    tasks = [task for task in ROWS if task.name in runs]
    large = [task for task in tasks if task.name in TELLING]
    small = [task for task in tasks if task.name not in TELLING]
    left, lines = 2 * len(large), -(-len(small) // _COLUMNS)
    # The same numbers give the same file.
    with mpl.rc_context({"svg.hashsalt": "papers", "font.size": 8, "axes.titlesize": 8}):
        figure = Figure(figsize=(2.2 * (left + _COLUMNS), 2 * lines + 0.6), layout="constrained")
        grid = figure.add_gridspec(lines, left + _COLUMNS)
        for task in large:
            panel = figure.add_subplot(grid[:, :left])
            panel.set_title(TELLING[task.name], fontsize=11)
            _curves(panel, runs[task.name], task.steps)
        for at, task in enumerate(small):
            panel = figure.add_subplot(grid[at // _COLUMNS, left + at % _COLUMNS])
            panel.set_title(task.name)
            _curves(panel, runs[task.name], task.steps)
        handles, labels = panel.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(_LINES), frameon=False)
        figure.supylabel("training loss: mean and range of the seeds")
        figure.savefig(path, metadata={"Date": None})
    return figure


def _curves(panel: Axes, row: dict[str, list[dict[str, Any]]], steps: int) -> None:
    """A line for each way, the mean over its seeds, and a band from the least to the most."""
    for way, outcomes in row.items():
        colour, style, width = _LINES[way]
        curves = np.array([outcome["curve"] for outcome in outcomes], dtype=float)  # null: NaN
        ends = np.linspace(0, steps, curves.shape[1] + 1)
        middles = (ends[1:] + ends[:-1]) / 2
        panel.plot(middles, curves.mean(0), style, color=colour, linewidth=width, label=way)
        panel.fill_between(middles, curves.min(0), curves.max(0), color=colour, alpha=0.12)
    panel.set_xlabel("steps")


_FP16 = {"become zero": "tab:red", "subnormal": "tab:orange", "normal": "tab:blue"}


def draw_gradients(path: Path, histograms: dict[str, dict[str, Any]]) -> Figure:
    """A panel for each task: percent of the activation gradients by magnitude, and what FP16 makes
    of those without a loss scale; `histograms` as in the report's JSON.
    """
    import matplotlib as mpl  # only this function needs it
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "gradients", "font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(4.5 * len(histograms), 2.8), layout="constrained")
        panels = figure.subplots(1, len(histograms), squeeze=False)[0]
        for axes, (name, histogram) in zip(panels, histograms.items(), strict=True):
            panel = chart(Histogram(**histogram)).panels[0]
            for kind, colour in _FP16.items():
                bars = [bar for bar in panel.bars if bar.range.name == kind]
                label = f"{kind}: {panel.percent(kind):.2g}%"
                heights = [bar.percent for bar in bars]
                lefts = [bar.left for bar in bars]
                axes.bar(lefts, heights, width=0.9, align="edge", color=colour, label=label)
            axes.set(title=name, xlabel="log2 of the magnitude", yscale="log")
            axes.legend(frameon=False, title="in FP16", loc="upper left")
        panels[0].set_ylabel("percent of the activation gradients")
        figure.savefig(path, metadata={"Date": None})
    return figure


if __name__ == "__main__":
    results = Path(sys.argv[1]) if sys.argv[1:] else RESULTS / "papers_cpu.json"
    read = json.loads(results.read_text())
    runs = {name: row["runs"] for name, row in read["rows"].items()}
    draw(ROOT / "docs" / "figures" / "papers.svg", runs)
    draw_gradients(ROOT / "docs" / "figures" / "gradients.svg", read["histograms"])
