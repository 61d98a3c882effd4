"""The first steps in FP16: steps skipped until the loss scale fits, and what finding it costs.

By default the first backward finds the scale (`mpcompile/scaling/fit_scale.py`);
`loss_scale="grad_scaler"` starts at 65536, as `torch.amp.GradScaler` does, and skips steps until
the scale has come down to where the gradients fit. Both train the same models, from the same
weights on the same batches, beside plain PyTorch in FP32: at O1 with a plain optimizer, and at O2
with an MPOptimizer. How far apart two trainings drift that differ in nothing but roundings is shown
by one more in FP32, whose first weights are rounded to FP16.

A deep GPT is compiled as a whole, block by block, with its equal blocks sharing one compile, and as
a whole training step. Timed are first steps in fresh processes: *cold* with empty caches, *warm*
with those that the cold one has left.
"""

from __future__ import annotations

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, paragraphs

from .measure import measure_all
from .report import make_report
from .trainings import TINY, WORK

__all__ = ["run"]


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` three small models for two steps."""
    device = settings.device
    work = TINY if settings.quick else WORK
    record = environment(device)
    found = measure_all(work, device)
    return make_report(f"first_steps_{device.type}", paragraphs(__doc__), work, found, record)
