"""Starts in fresh processes: from the call that compiles to the end of the first step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.processes import json_from_process
from benchmarks.harness.timing import idle_wait
from mpcompile import compiled_plans

from .arms import OURS, Trainee, Work, work_for

__all__ = ["first_step", "measure_starts"]


def measure_starts(
    work: Work, device: torch.device, arms: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Each arm: one cold start, then warm ones in turns; every arm has caches of its own."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as caches:

        def start(name: str) -> dict[str, Any]:
            return _start(name, device, Path(caches) / name.replace(" ", "_"))

        for name in arms:
            found[name] = {"cold": start(name), "warm": []}
        for _ in range(work.warm_starts):
            for name in arms:
                found[name]["warm"].append(start(name))
    return found


def _start(name: str, device: torch.device, cache: Path) -> dict[str, Any]:
    arguments = ("-m", "benchmarks.gpt", name, str(device))
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    found: dict[str, Any] = json_from_process(*arguments, environment=caches)
    return found


def first_step(name: str, device: torch.device) -> dict[str, Any]:
    """What the fresh process does: the first step, timed. CPU time does not see other processes."""
    trainee, wait = Trainee(name, work_for(device), device), idle_wait(device)
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    trainee.compile()
    trainee.step()
    wait()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    counters = torch._dynamo.utils.counters
    plans = compiled_plans(trainee.model) if name in OURS else []
    return {
        "seconds": wall,
        "cpu_seconds": cpu,
        "passes": sum(sum(plan.seconds.values()) for plan in plans),
        "cache_hits": counters["aot_autograd"]["autograd_cache_hit"],
    }
