"""Models that people train: a whole training step against torch.compile and autocast.

One step is forward, loss, backward, AdamW and `zero_grad`. The peers are torch.compile in FP32 and
under autocast, with the fused AdamW, and with a GradScaler where the low dtype is FP16: on a CPU it
is BF16. O1 has the same fused AdamW, O2 an `MPOptimizer`. On a CPU the models are those of
transformers, which compute their own loss, and of timm; on a GPU, where these may not be installed,
the same networks from plain torch.nn. The first step is the one that compiles; the first arm of a
model also fills Inductor's caches for the others.
"""

from __future__ import annotations

import torch

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, paragraphs, where
from benchmarks.peers.measure import Work, measure_all
from benchmarks.peers.report import make_report
from benchmarks.peers.ways import AUTOCAST, COMPILED, OURS

from .tasks import BY_DEVICE, TINY

__all__ = ["full", "quick", "run"]

MODULE = f"{__name__}.tasks"
ARMS = (COMPILED, AUTOCAST, *OURS)


def run(settings: Settings) -> Report:
    """Measure each model; under `settings.quick` two tiny ones, twice, without compiling."""
    device = settings.device
    work = quick() if settings.quick else full(device)
    return make_report(
        "real_models",
        f"Models that people train, on {where(device)}",
        device,
        work,
        measure_all(work, device),
        paragraphs(__doc__),
        environment(device),
        asked=None,
    )


def full(device: torch.device) -> Work:
    """All models of a device. What is measured is kept until all are."""
    names = tuple(task.name for task in BY_DEVICE[device.type])
    return Work(rounds=12, seconds=1.0, resumes=True, module=MODULE, tasks=names, arms=ARMS)


def quick() -> Work:
    """A smoke test."""
    names = tuple(task.name for task in TINY)
    return Work(
        "eager", rounds=2, seconds=0.0, processes=False, module=MODULE, tasks=names, arms=ARMS
    )
