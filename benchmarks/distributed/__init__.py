"""Collectives and bytes that a training step sends, counted on two CPU processes.

Each arm trains the same small GPT-2 on two processes that talk through gloo: under
DistributedDataParallel, and with `fully_shard` on each layer and on the model. The peer is autocast
with a GradScaler. Another row for each engine is what a user of PyTorch would write to send FP16:
a communication hook for DDP, a `MixedPrecisionPolicy` for FSDP2. Ours is `mpcompile` around what
the engine made, at O1 and O2, with AdamW as it is or in an `MPOptimizer`; everything in FP16.

Whatever sends leaves an event in the profiler with its size and its dtype: DDP's reducer in C++,
FSDP, a norm over shards, and what we add (`benchmarks/distributed/counting.py`). An event that is
not understood is an error, and so are ranks or steps that differ.
"""

from __future__ import annotations

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, paragraphs

from .arms import ARMS, TINY, WORK
from .measure import measure_all
from .report import make_report

__all__ = ["run"]

DEVICES = ("cpu",)  # two processes with one GPU each: more than a machine of ours has


def run(settings: Settings) -> Report:
    """Count every arm; under `settings.quick` a tiny model."""
    record = environment(settings.device)
    work = TINY if settings.quick else WORK
    found = measure_all(work, ARMS)
    return make_report(
        f"distributed_{settings.device.type}", paragraphs(__doc__), work, found, record
    )
