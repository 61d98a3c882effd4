"""The claims of "Mixed Precision Training" (ICLR 2018), made again in small.

Micikevicius et al. train networks for classification, detection, speech, translation, language and
images with FP16 weights, activations and gradients, FP32 master weights and loss scaling, and reach
FP32's accuracy without a changed hyperparameter. Each row here is such a network, written from its
own paper and made narrow enough for two CPU cores, on data that ships with a package or is
generated; the DLRM row is beside the paper's, and two detectors are torchvision's own code, where
that is installed. Small batches make large gradients: three rows, whose loss is divided by a number
of micro-batches, have gradients as small as a step of the paper's big LSTM (20,480 words), of GPT-2
(2^19 tokens) and of a transformer that translates (320,000 words) has. "FP16 O2, no loss scale"
leaves out loss scaling, and nothing else. O2 has an `MPOptimizer`, so weights and their gradients
are FP16 there, as in the paper; O1 has the plain optimizer.

A seed sets the initial weights and the order of the data. The FP32 runs are plain eager PyTorch.
The others differ from them by `mpcompile(model, ...)`, and at O2 by `MPOptimizer(optimizer)`.
Everything is judged by the same eager FP32 forward on data held out from training.

The rule: S is the spread of a metric, its largest value over the FP32 seeds less its smallest. A
way passes if the mean over its seeds is at most S away from the mean of the FP32 runs of the same
seeds ("off the mean"), and no single run is more than S away from the FP32 run of its seed ("off
the seed", the worst of them). It has to pass for every metric; "(off)" stands where it does not.
What is off is trained once more, from all of FP32's seeds, and tested for chance (at the end).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.harness.report import Report, Settings, paragraphs
from benchmarks.papers import again as second
from benchmarks.papers.report import LOOKS, look, make_report
from benchmarks.papers.rows import FULL, QUICK, Kept, Work, train_rows
from benchmarks.papers.task import QUALITY
from benchmarks.papers.tasks import BIG_LSTM, ROWS, SSD

__all__ = ["report_of", "run"]


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` two steps of one seed, without compiling."""
    work, device = QUICK if settings.quick else FULL, settings.device
    rows = train_rows(work, device)
    looked = {} if settings.quick else {
        task.name: found
        for task in ROWS
        if task.name in rows and not task.lacking
        and (found := second.look_again(task, rows[task.name], device)) is not None
    }  # fmt: skip
    return report_of(rows, looked, work, device)


def report_of(
    rows: Mapping[str, Kept], again: Mapping[str, Kept], work: Work, device: torch.device
) -> Report:
    """The report of the rows that there are, by the task's name.

    Args:
        again: what was off in them, trained from all seeds.
    """
    there = [task for task in ROWS if task.name in rows]
    looked_at = [task for task in there if task in (SSD, BIG_LSTM)]
    histograms = {task.name: look(task, device, work.steps) for task in looked_at}
    data = "; ".join(f"{task.name}: {task.data} ({task.steps} steps)" for task in there)
    how = (
        f"Seeds: {work.seeds} of FP32, {work.mixed_seeds} of the others. Compiled graphs run under "
        f"`{work.emit}`, on one thread. Figure: docs/figures/papers.svg, which "
        "`python -m benchmarks.figures` draws."
    )
    magnitudes = (
        "Activation gradients: of the SSD and the big LSTM in FP32, as `mpcompile.diagnose` "
        f"finds them in FP64 at {LOOKS} places of a training; the loss scale is the lowest with "
        "which FP16 at O2 ended. Figure: docs/figures/gradients.svg."
    )
    machines = ", ".join(sorted({row.machine for row in (*rows.values(), *again.values())}))
    notes = [*paragraphs(__doc__), f"Data: {data}.", how, magnitudes, f"Trained on: {machines}."]
    for packages in sorted({rows[task.name].packages for task in there if task.needs} - {""}):
        them = (task.name for task in there if task.needs and rows[task.name].packages == packages)
        notes.append(f"With {packages}: {', '.join(them)}.")
    if again:
        notes += paragraphs(second.__doc__)
    for name, row in ((task.name, rows[task.name].runs) for task in there):
        if any(len(row.get(way.name, ())) < len(work.seeds_of(way)) for way in QUALITY):
            seeds = ", ".join(f"{way} {len(runs)}" for way, runs in row.items())
            notes.append(f"{name} has fewer seeds so far: {seeds}.")
    if missing := [task.name for task in ROWS if task.name not in rows]:
        notes.append(f"**Not trained yet: {', '.join(missing)}.**")
    trained = [task for task in there if rows[task.name].fingerprint]
    if earlier := [t.name for t in trained if not rows[t.name].is_of_now(t)]:
        notes.append(f"Trained by an earlier state of this project: {', '.join(earlier)}.")
    return make_report(notes, there, rows, again, histograms)
