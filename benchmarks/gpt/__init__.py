"""A 4-layer GPT in BF16: step time, memory and compile time against torch.compile.

The arms train the same model on the same batch: torch.compile in FP32, torch.compile under
autocast(bfloat16), and mpcompile at O1, at O2, and at O2 with `recompute=True`, which is there to
show what saving memory costs. On CUDA two more train in FP16 with a loss scale: autocast under a
GradScaler, and mpcompile at O2 under an MPOptimizer. A step is the forward (the loss is inside the
compiled function) and the backward; a second measurement adds the AdamW step.

Start times are those of a fresh process, from the call that compiles to the end of the first step
(Inductor is imported by the one or by the other): *cold* with empty caches, *warm* in later
processes that find the caches of the first.
"""

from __future__ import annotations

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings

from .arms import TINY, work_for
from .measure import measure_all
from .report import make_report

__all__ = ["run"]


def run(settings: Settings) -> Report:
    """Measure everything; under `settings.quick` a tiny model, once, without compiling."""
    device = settings.device
    work = TINY if settings.quick else work_for(device)
    record = environment(device)
    return make_report(work, device, measure_all(work, device), record)
