"""The most memory that a step allocates beyond what is there when it begins."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

_MARK = "the step whose memory is measured"


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Bytes; the step runs twice."""
    step()
    return _on_cuda(step, device) if device.type == "cuda" else _on_cpu(step)


def _on_cuda(step: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _on_cpu(step: Callable[[], object]) -> int:
    """By the profiler. It sees the end of only what it has seen begin, and a step frees what the
    one before has left (a loss, gradients); so it sees two steps, and counts in the second.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
        with record_function(_MARK):
            step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    (marked,) = (e for e in events if e.get("name") == _MARK and e["ph"] == "X")
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    present = highest = 0
    for event in memory:
        if marked["ts"] <= event["ts"] <= marked["ts"] + marked["dur"]:
            present += event["args"]["Bytes"]
            highest = max(highest, present)
    return highest
