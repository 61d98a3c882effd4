"""Bars of speed and of bytes. `python -m benchmarks.peers.figure` draws what is committed."""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.processes import ROOT
from benchmarks.harness.report import RESULTS

from .ways import AUTOCAST, BUDGETED, COMPILED, EAGER, PIECES, RECOMPUTES, WHOLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

Row = dict[str, Any]

_COLOURS = {
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


def draw(path: Path, rows: dict[str, Row]) -> Figure:
    """Times of a step and bytes saved, each over compile + autocast; `rows` as in the JSON."""
    import matplotlib as mpl  # only this function needs it
    from matplotlib.figure import Figure

    # The same numbers give the same file.
    with mpl.rc_context({"svg.hashsalt": "peers", "font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(12, 7), layout="constrained")
        times, sizes = figure.subplots(2, 1)
        times.set_title("Steps a second, over compile + autocast: higher is better")
        _bars(times, rows, _speed)
        sizes.set_title("Bytes saved for the backward, over compile + autocast: lower is better")
        _bars(sizes, rows, _saved)
        labels = {name: bar for a in (times, sizes) for bar, name in zip(*_legend(a), strict=True)}
        figure.legend(
            labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False
        )
        figure.savefig(path, metadata={"Date": None})
    return figure


def _legend(axes: Axes) -> tuple[list[Any], list[str]]:
    bars, names = axes.get_legend_handles_labels()
    return list(bars), list(names)


def _speed(row: Row, way: str) -> float | None:
    seconds = row["seconds"]
    if way not in seconds or AUTOCAST not in seconds:
        return None
    return statistics.median(seconds[AUTOCAST]) / statistics.median(seconds[way])


def _saved(row: Row, way: str) -> float | None:
    saved = row["saved"]
    return saved[way] / saved[AUTOCAST] if way in saved and saved.get(AUTOCAST) else None


def _bars(axes: Axes, rows: dict[str, Row], value: Callable[[Row, str], float | None]) -> None:
    ways = [way for way in _COLOURS if any(value(row, way) for row in rows.values())]
    width = 0.8 / len(ways)
    for i, way in enumerate(ways):
        places = [k + (i - (len(ways) - 1) / 2) * width for k in range(len(rows))]
        heights = [value(row, way) or 0.0 for row in rows.values()]
        axes.bar(places, heights, width, color=_COLOURS[way], label=way)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [textwrap.fill(name, 14) for name in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)


if __name__ == "__main__":
    results = Path(sys.argv[1]) if sys.argv[1:] else RESULTS / "peers_cpu.json"
    draw(ROOT / "docs" / "figures" / "peers.svg", json.loads(results.read_text())["rows"])
