"""Derivatives inside of what is compiled: the part of their products that is low, beside peers.

Each program is a small network (widths 16 and 64, batch 32) whose loss holds a derivative, a
transform of torch.func or control flow. It runs op by op (`aot_eager`); the profiler says which
products it calls, forward and backward, with which sizes and dtypes. "off" is the largest distance
of a parameter's gradient from that of the same program in FP64, relative to its norm. The level is
O1. `compile + autocast` has `torch._dynamo.config.trace_autograd_ops` set, without which it breaks
its graph at `torch.autograd.grad`, and can't go backward. Neither autocast has a GradScaler, so in
FP16 their distances tell nothing of one that has.
"""

from __future__ import annotations

import torch

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain

from .count import WAYS, Found, found_of
from .programs import DERIVATIVES, OTHERS

__all__ = ["run"]

DEVICES = ("cpu",)
_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}


def run(settings: Settings) -> Report:
    """Count everything; under `settings.quick` one program in BF16."""
    record = environment(settings.device)
    programs = {**DERIVATIVES, **OTHERS}
    dtypes = _DTYPES
    if settings.quick:
        programs, dtypes = {"func.grad": programs["func.grad"]}, {"BF16": torch.bfloat16}
    found = {
        word: {
            name: {way: found_of(build, way, dtype) for way in WAYS}
            for name, build in programs.items()
        }
        for word, dtype in dtypes.items()
    }
    ours = [f for by_name in found.values() for ways in by_name.values() for f in _ours(ways)]
    return Report(
        f"second_order_{settings.device.type}",
        "Derivatives inside of what is compiled",
        paragraphs(__doc__),
        [
            Table(f"{word}: part of the products that is low, and how far gradients are off",
                  ("program", *WAYS), [(n, *map(_cell, w.values())) for n, w in by_name.items()])
            for word, by_name in found.items()
        ],
        {"every program runs in both forms, each gradient within 0.1 of FP64's": all(
            f.off is not None and f.off < 0.1 for f in ours
        )},
        {"found": plain(found)},
        record,
    )  # fmt: skip


def _ours(ways: dict[str, Found]) -> list[Found]:
    return [found for way, found in ways.items() if way.startswith("mpcompile")]


def _cell(found: Found) -> str:
    if found.low is None or found.off is None:
        return found.error[:60]
    return f"{found.low:.0%}, {found.off:.1g}"
