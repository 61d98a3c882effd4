"""The figure: loss curves, and the histogram of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .fp16 import lost
from .training import DYNAMIC, FP32, HALF_WEIGHTS, MASTERS, UNSCALED, Outcome, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "draw_report"]


def draw_report(path: Path, report: dict[str, Any]) -> Figure:
    """As `draw`, of what the report's JSON says."""
    stored, scaled = (
        {arm: [Outcome(**one) for one in outcomes] for arm, outcomes in report[kind].items()}
        for kind in ("master weights", "loss scaling")
    )
    shares = report["activation gradients, share by octave"]
    gradients = {int(octave): share for octave, share in shares.items()}
    return draw(path, stored=stored, scaled=scaled, gradients=gradients)


def draw(path: Path, *, stored: Results, scaled: Results, gradients: Mapping[int, float]) -> Figure:
    """Two sets of loss curves and the histogram between what FP16 holds and what it does not;
    `gradients` as `Magnitudes.shares` returns them.
    """
    import matplotlib as mpl  # only this function needs it
    from matplotlib.figure import Figure

    # The same numbers give the same file.
    with mpl.rc_context({"svg.hashsalt": "ablations", "font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        first, second, third = figure.subplots(1, 3)
        first.set_title("FP16 weights lose small updates: training stalls")
        _curves(first, stored, "steps of SGD, learning rate 0.0005")
        first.set_ylabel("training loss, cross-entropy")
        second.set_title("Without loss scaling small gradients are lost")
        _curves(second, scaled, "steps of Adam")
        second.set_ylabel("training loss, mean squared error")
        second.set_yscale("log")
        third.set_title("Gradients of layers' outputs in FP32 training")
        _histogram(third, gradients)
        figure.savefig(path, metadata={"Date": None})
    return figure


def _curves(axes: Axes, results: Results, label: str) -> None:
    """A line for each arm, the mean over its seeds, and a band from the least to the most."""
    for arm, outcomes in results.items():
        color, style, width = _LINES[arm]
        curves = torch.tensor([outcome.curve for outcome in outcomes])
        ends = torch.linspace(0, outcomes[0].steps, curves.shape[1] + 1)
        middles = (ends[1:] + ends[:-1]) / 2
        axes.plot(middles, curves.mean(0), style, color=color, linewidth=width, label=arm)
        axes.fill_between(middles, curves.amin(0), curves.amax(0), color=color, alpha=0.15)
    seeds = len(results[FP32])
    axes.set_xlabel(f"{label}; mean and range of {seeds} seeds")
    axes.legend(frameon=False)


# Color, style, width. FP32 is wide and pale, the others lie on top of it where they agree.
_LINES = {
    FP32: ("0.7", "-", 5.0),
    MASTERS: ("tab:blue", "-", 1.5),
    HALF_WEIGHTS: ("tab:red", "-", 1.5),
    UNSCALED: ("tab:red", "-", 1.5),
    "FP16, scale 8": ("tab:orange", "-", 1.5),
    "FP16, scale 128": ("tab:green", "--", 1.5),
    DYNAMIC: ("tab:blue", ":", 1.5),
}


def _histogram(axes: Axes, shares: Mapping[int, float]) -> None:
    axes.bar(
        [octave + 0.5 for octave in shares], [100 * x for x in shares.values()], 0.9, color="0.5"
    )
    axes.set_xlim(-46, 0)
    axes.set_xlabel("log2 of the magnitude; shaded: zero in FP16")
    axes.set_ylabel("share of all gradients, %")
    axes.axvspan(-46, -25, color="tab:red", alpha=0.12, linewidth=0)
    for exponent, what in ((-24, "smallest FP16 number"), (-14, "smallest normal FP16 number")):
        axes.axvline(exponent, color="tab:red", linestyle="--")
        axes.annotate(
            f"$2^{{{exponent}}}$: {what}", (exponent, 1), xycoords=("data", "axes fraction"),
            xytext=(3, -4), textcoords="offset points", rotation=90, va="top",
        )  # fmt: skip
    axes.annotate(
        f"zero in FP16:\n{lost(shares, 1):.0%} unscaled\n{lost(shares, 8):.0%} scaled by 8\n"
        f"{lost(shares, 128):.0%} scaled by 128",
        (0.02, 0.97), xycoords="axes fraction", va="top",
    )  # fmt: skip
