"""torchvision's models in FP16: gradients against FP64, graphs, fallbacks, sizes that change.

Detectors, which are called with lists and choose boxes by value; segmentation; two heads beside the
main one (GoogLeNet, Inception); pairs of images (RAFT); clips. All have random weights. Their
images are small, and so are the models where torchvision's constructors let them be: the detectors
with a feature pyramid have four residual blocks, Swin, MViT, DenseNet and R3D two to four; the
others are as torchvision ships them. Dropout and stochastic depth are off, and detectors keep all
boxes and anchors, so that no rounding chooses others (`benchmarks/zoo/torchvision_models.py`).

The judge is that of the zoo (`benchmarks/zoo/`, whose report says what an error, a ratio and a
fault are), with two draws of weights and batch, and behind them one more for each of ten other
sizes of images (SSD: three sizes; of one size each: two more for Inception, whose auxiliary head
takes no small images, and ten for MViT and Swin). *Further off* means: in each of all these draws.
SSD, Inception and DeepLab run in BF16, without a GradScaler; the others in FP16. Where autocast's
error is about 1 or more, as in Inception at its initial weights, no way computes the gradient, and
the row compares nothing but graphs.

"compile + autocast" is torch.compile (`backend="aot_eager"`) under torch.autocast with a
GradScaler; "compile FP32" is torch.compile alone. Graphs count those that Dynamo compiled, also for
other sizes. A frame is a function that Dynamo leaves to Python; one that torch.compile doesn't
leave is a fault, and so are more graphs over all sizes than torch.compile makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from benchmarks import zoo
from benchmarks.harness.report import Report, Settings, Table, paragraphs
from benchmarks.zoo import no_further_off, ratio_to
from benchmarks.zoo.catalogue import TORCHVISION, rows_of
from benchmarks.zoo.measure import BOTH, COMPILED, LEVELS

DEVICES = ("cpu",)
NEEDS = ("torchvision",)

DRAWS = 2
QUICK = ("torchvision/retinanet", "torchvision/swin")
_PIECE = 2


def run(settings: Settings) -> Report:
    """Measure every model, in as many processes as there are cores; under `settings.quick` two,
    drawn once. Rows are kept in `benchmarks/scratch/` as the zoo keeps them.
    """
    rows = rows_of("vision", LEAST, DRAWS, QUICK, quick=settings.quick, piece=_PIECE)
    report = make_report(paragraphs(__doc__), rows)
    return dataclasses.replace(report, beside={"torchvision": version("torchvision")})


# -- report ----------------------------------------------------------------------------------------
# The zoo's report, with what torchvision's models have beyond it: sizes, frames, another peer.

LEAST = {"torchvision": 16}
"""Architectures that were asked for."""

Row = Mapping[str, Any]


def make_report(notes: Sequence[str], rows: Sequence[Row]) -> Report:
    """The whole report."""
    there = {row["name"].partition("/")[2] for row in rows}
    if missing := [model for model in TORCHVISION if model not in there]:
        notes = [*notes, f"**Not measured yet: {', '.join(missing)}.**"]
    report = zoo.make_report(notes, rows, LEAST)
    compared = dict(no_further_off(rows, [(level, BOTH) for level in LEVELS]))
    return dataclasses.replace(
        report,
        title="torchvision's models in FP16",
        tables=[*report.tables, _more(rows), _frames(rows)],
        verdicts={**report.verdicts, **compared},
    )


def _more(rows: Sequence[Row]) -> Table:
    def cells(row: Row) -> tuple[str, ...]:
        arms = {arm: row["arms"][arm] for arm in shown}
        ratios = [ratio_to(row, level, BOTH, "error") for level in LEVELS]
        return (
            row["name"].partition("/")[2],
            _of_each(arms, lambda arm: arm["resized"]),
            _of_each(arms, lambda arm: len(arm["frames"])),
            *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        )

    shown = (COMPILED, BOTH, *LEVELS)
    columns = ("model", f"graphs, all sizes: {' / '.join(shown)}", "frames left to Python",
               *(f"{level} over {BOTH}" for level in LEVELS))  # fmt: skip
    return Table("Changing sizes", columns, [cells(row) for row in rows if "arms" in row])


def _frames(rows: Sequence[Row]) -> Table:
    """What O1 leaves to Python, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for frame in row.get("arms", {}).get("O1", {}).get("frames", ()):
            place, _, why = frame.partition(": ")
            found.setdefault((place, why), []).append(row["name"].partition("/")[2])
    lines = [(place, why, ", ".join(models)) for (place, why), models in found.items()]
    return Table("Frames that O1 leaves to Python", ("frame", "why", "models"), lines)


def _of_each(arms: Mapping[str, Row], say: Callable[[Row], int]) -> str:
    return " / ".join("-" if "failed" in arm else str(say(arm)) for arm in arms.values())
