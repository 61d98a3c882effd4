"""The optimizer step alone: MPOptimizer against GradScaler with fused and foreach AdamW.

AdamW over the parameters of a GPT, no model and no backward. What differs is what arrives and what
has to be left behind:

* *FP32 gradients*: check them, skip or update.
* *Low gradients, copies*: what O2 does. Gradients are stored in the low dtype (BF16 on CPU, FP16
  times the loss scale on CUDA), and the step leaves low-precision copies of the FP32 weights for
  the next forward. A peer has FP32 gradients; it casts its weights after its step.

Each also with clipping to a global norm of 1: `GradScaler.unscale_` and `clip_grad_norm_` for the
peers. All loss scales are 1 and stay so: peers unscale in place, and gradients that shrink in every
step would soon be denormals, which a CPU is slow at. (A multiplication by 1 is not left out.)

Bytes per parameter: ours are counted from the pieces that were compiled, each input of a piece read
once and each target written once; those of the peers are arithmetic, the reasons are in `PEERS`.
"""

from __future__ import annotations

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, paragraphs

from .arms import TINY, work_for
from .measure import measure_all
from .report import make_report

__all__ = ["run"]


def run(settings: Settings) -> Report:
    """Measure everything; under `settings.quick` tiny shapes, once, without compiling."""
    device = settings.device
    work = TINY if settings.quick else work_for(device)
    record = environment(device)
    return make_report(paragraphs(__doc__), work, device, measure_all(work, device), record)
