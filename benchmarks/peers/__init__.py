"""The papers' tasks, a whole training step: time and bytes against every peer.

The tasks are those of the `papers` benchmark, each with its own loop: forward, loss, backward,
clipping where it clips, the optimizer's step. The peers are plain PyTorch, eager and under
`torch.compile`, in FP32 and under autocast, with fused optimizers and with a GradScaler where the
low dtype is FP16; and torch.compile with an activation_memory_budget of 0.5. The low dtype is BF16
on a CPU, where mpcompile runs with `dtype="auto"`, and FP16 elsewhere. O1 has the same plain fused
optimizer as the peers, O2 an `MPOptimizer`. `mpcompile(step)` can't compile two of the steps as a
whole, Deep Speech 2's (its CTC loss) and the big LSTM's (projections): they run in pieces there.

Bytes saved for the backward are those that autograd holds after the forwards of a step. The peak
is the most that a step adds to what lies there between two steps.
"""

from __future__ import annotations

import torch

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, paragraphs, where

from .measure import FULL, QUICK, RERUN, Work, measure_all
from .report import make_report

__all__ = ["rerun", "run"]


def run(settings: Settings) -> Report:
    """Measure everything; under `settings.quick` two rounds, without compiling."""
    return _measured(QUICK if settings.quick else FULL, settings.device)


def rerun(device: torch.device) -> Report:
    """A few tasks that are compiled fast, to be held against the committed ratios."""
    return _measured(RERUN, device)


def _measured(work: Work, device: torch.device) -> Report:
    record = environment(device)
    rows = measure_all(work, device)
    title = f"Every peer on the papers' tasks, on {where(device)}"
    return make_report("peers", title, device, work, rows, paragraphs(__doc__), record)
