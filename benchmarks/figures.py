"""The figures of docs/figures/ that show committed results: `python -m benchmarks.figures`."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import ablations
from benchmarks.harness.processes import ROOT
from benchmarks.harness.report import RESULTS
from benchmarks.harness.ways import AUTOCAST, BUDGETED, COMPILED, EAGER, PIECES, RECOMPUTES, WHOLE
from benchmarks.papers.report import Histogram, chart
from benchmarks.papers.task import FP32, UNSCALED
from benchmarks.papers.tasks import ROWS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = ROOT / "docs" / "figures"

Report = Mapping[str, Any]
"""As the report's JSON has it."""

Lines = Mapping[str, tuple[str, str, float]]
"""Way -> colour, style, width. FP32 is wide and pale, the others lie on it where they agree."""


@contextlib.contextmanager
def _saved(path: Path, size: tuple[float, float], **fonts: float) -> Iterator[Figure]:
    """A figure of this size in inches, which is saved at the end: the same numbers give the same
    file.

    Args:
        fonts: as matplotlib's rcParams, with underscores for dots.
    """
    import matplotlib as mpl  # nothing else needs it
    from matplotlib.figure import Figure

    settings = {name.replace("_", "."): value for name, value in fonts.items()}
    with mpl.rc_context({"svg.hashsalt": path.stem, **settings}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None})


def _curves(axes: Axes, runs: Report, steps: int, lines: Lines, band: float) -> None:
    """Training loss by step: a line for each way, the mean over its seeds, and a band of opacity
    `band` from the least to the most.
    """
    for way, outcomes in runs.items():
        colour, style, width = lines[way]
        curves = np.array([outcome["curve"] for outcome in outcomes], dtype=float)  # null: NaN
        ends = np.linspace(0, steps, curves.shape[1] + 1)
        middles = (ends[1:] + ends[:-1]) / 2
        axes.plot(middles, curves.mean(0), style, color=colour, linewidth=width, label=way)
        axes.fill_between(middles, curves.min(0), curves.max(0), color=colour, alpha=band)


def _legend(figure: Figure, columns: int) -> None:
    """One legend for all panels, below them: what one of them lacks another has."""
    shown = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=columns, frameon=False
    )


# -- ablations -------------------------------------------------------------------------------------

_ABLATIONS: Lines = {
    ablations.FP32: ("0.7", "-", 5.0),
    ablations.MASTERS: ("tab:blue", "-", 1.5),
    ablations.HALF_WEIGHTS: ("tab:red", "-", 1.5),
}


def draw_ablations(path: Path, report: Report) -> Figure:
    """Loss curves with FP32 master weights and without."""
    runs = report["master weights"]
    seeds = runs[ablations.FP32]
    with _saved(path, (5, 4.2), font_size=9, axes_titlesize=10) as figure:
        axes = figure.subplots()
        axes.set_title("FP16 weights lose small updates: training stalls")
        _curves(axes, runs, seeds[0]["steps"], _ABLATIONS, band=0.15)
        axes.set_xlabel(f"steps of SGD, learning rate 5e-4; mean and range of {len(seeds)} seeds")
        axes.set_ylabel("training loss, cross-entropy")
        axes.legend(frameon=False)
    return figure


# -- peers -----------------------------------------------------------------------------------------

_BARS = {
    EAGER: "0.85",
    COMPILED: "0.7",
    AUTOCAST: "0.5",
    BUDGETED: "0.3",
    PIECES[0]: "tab:blue",
    PIECES[1]: "tab:orange",
    WHOLE[0]: "lightblue",
    WHOLE[1]: "wheat",
    RECOMPUTES: "tab:green",
}


def draw_peers(path: Path, report: Report) -> Figure:
    """Bars of the times of a step and of bytes saved, each over compile + autocast."""
    rows = report["rows"]
    with _saved(path, (12, 7), font_size=9, axes_titlesize=10) as figure:
        times, sizes = figure.subplots(2, 1)
        times.set_title("Steps a second, over compile + autocast: higher is better")
        _bars(times, rows, _speed)
        sizes.set_title("Bytes saved for the backward, over compile + autocast: lower is better")
        _bars(sizes, rows, _saved_bytes)
        _legend(figure, columns=4)
    return figure


def _speed(row: Report, way: str) -> float | None:
    seconds = row["seconds"]
    if way not in seconds or AUTOCAST not in seconds:
        return None
    return statistics.median(seconds[AUTOCAST]) / statistics.median(seconds[way])


def _saved_bytes(row: Report, way: str) -> float | None:
    saved = row["saved"]
    return saved[way] / saved[AUTOCAST] if way in saved and saved.get(AUTOCAST) else None


def _bars(axes: Axes, rows: Report, value: Callable[[Report, str], float | None]) -> None:
    ways = [way for way in _BARS if any(value(row, way) for row in rows.values())]
    width = 0.8 / len(ways)
    for i, way in enumerate(ways):
        places = [k + (i - (len(ways) - 1) / 2) * width for k in range(len(rows))]
        heights = [value(row, way) or 0.0 for row in rows.values()]
        axes.bar(places, heights, width, color=_BARS[way], label=way)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [textwrap.fill(name, 14) for name in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)


# -- real models -----------------------------------------------------------------------------------


def draw_real_models(path: Path, report: Report) -> Figure:
    """Bars of how many times as fast a step is as under compile + autocast; the README's chart."""
    ratios = report["ratios"]
    names = list(ratios)[::-1]  # the first one on top
    with _saved(path, (9, 3.2), font_size=10, axes_titlesize=11) as figure:
        axes = figure.subplots()
        axes.set_title("Training steps a second; torch.compile + autocast makes 1.0")
        for way, colour, above in zip(PIECES, ("tab:blue", "tab:orange"), (0.2, -0.2), strict=True):
            found = [ratios[name][f"{way} over {AUTOCAST}"]["paired"] for name in names]
            places = [k + above for k in range(len(names))]
            bars = axes.barh(places, found, 0.38, color=colour, label=way)
            beside = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line at 1.0
            axes.bar_label(bars, [f"{ratio:.2f}x" for ratio in found], padding=3, bbox=beside)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(0, 1.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="center right")
    return figure


# -- papers ----------------------------------------------------------------------------------------

_PAPERS: Lines = {
    FP32.name: ("0.75", "-", 5.0),
    UNSCALED.name: ("tab:red", "-", 1.2),
    "FP16 O1": ("tab:blue", "-", 1.2),
    "FP16 O2": ("tab:blue", ":", 1.6),
    "BF16 O1": ("tab:green", "-", 1.2),
    "BF16 O2": ("tab:green", ":", 1.6),
}

# The row that does not learn without a loss scale, and what its panel is called.
TELLING = {"GPT, 2^19 tokens": "GPT with the gradients of a batch of 2^19 tokens"}
_COLUMNS = 4


def draw_papers(path: Path, report: Report) -> Figure:
    """Panels of training loss, one for each task; the telling one is large."""
    tasks = [task for task in ROWS if task.name in report["rows"]]
    large = [task for task in tasks if task.name in TELLING]
    small = [task for task in tasks if task.name not in TELLING]
    left, lines = 2 * len(large), -(-len(small) // _COLUMNS)
    size = (2.2 * (left + _COLUMNS), 2 * lines + 0.6)
    with _saved(path, size, font_size=8, axes_titlesize=8) as figure:
        grid = figure.add_gridspec(lines, left + _COLUMNS)
        places = [grid[:, :left] for _ in large]
        places += [grid[k // _COLUMNS, left + k % _COLUMNS] for k in range(len(small))]
        for place, task in zip(places, (*large, *small), strict=True):
            panel = figure.add_subplot(place)
            if task.name in TELLING:
                panel.set_title(TELLING[task.name], fontsize=11)
            else:
                panel.set_title(task.name)
            runs = report["rows"][task.name]["runs"]
            _curves(panel, runs, task.steps, _PAPERS, band=0.12)
            panel.set_xlabel("steps")
        _legend(figure, columns=len(_PAPERS))
        figure.supylabel("training loss: mean and range of the seeds")
    return figure


_FP16 = {"become zero": "tab:red", "subnormal": "tab:orange", "normal": "tab:blue"}


def draw_gradients(path: Path, report: Report) -> Figure:
    """A panel for each task that was looked into: percent of the activation gradients by magnitude,
    and what FP16 makes of those without a loss scale.
    """
    histograms = report["histograms"]
    size = (4.5 * len(histograms), 2.8)
    with _saved(path, size, font_size=8, axes_titlesize=9) as figure:
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
    return figure


DRAWN: Mapping[str, tuple[Callable[[Path, Report], Figure], str]] = {
    "ablations": (draw_ablations, "ablations_cpu"),
    "gradients": (draw_gradients, "papers_cpu"),
    "papers": (draw_papers, "papers_cpu"),
    "peers": (draw_peers, "peers_cpu"),
    "real_models": (draw_real_models, "real_models_cpu"),
}
"""Figure -> what draws it, and the report whose numbers it shows."""


if __name__ == "__main__":
    for name in sys.argv[1:] or DRAWN:
        draw, report = DRAWN[name]
        draw(FIGURES / f"{name}.svg", json.loads((RESULTS / f"{report}.json").read_text()))
