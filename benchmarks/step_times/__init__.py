"""Forward and backward of any model, timed in turns: compile FP32, compile + autocast, O1 and O2.

What `conv` and `small` share. The peers are the two ways to train that a user of
torch.compile has, in FP32 and under autocast(bfloat16); which of them is faster depends on
the model, and mpcompile should not have to be told: each level is held against the better one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, where

from .measure import Work, measure_all
from .report import make_report

__all__ = ["compare"]


def compare(
    name: str, title: str, notes: Sequence[str], work: Work, device: torch.device
) -> Report:
    """Time each model under every arm, one model after the other; `name` is the benchmark's."""
    record = environment(device)
    found = measure_all(work, device)
    full_name, full_title = f"{name}_{device.type}", f"{title} on {where(device)}"
    return make_report(full_name, full_title, notes, work, found, record)
