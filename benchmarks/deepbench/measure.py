"""Each shape in FP32 and the low dtype, aligned and odd, in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from benchmarks.harness.timing import Arm, far_behind, idle_wait, take_turns
from mpcompile.profile import Profile, load
from mpcompile.profile.calls import Point, build
from mpcompile.profile.model import KINDS

from . import shapes
from .shapes import Shape

__all__ = ["ARMS", "LOW", "ODD", "QUICK", "Found", "Work", "low_of", "measure_all", "work_for"]

FULL, LOW = "FP32", "low"
ODD = "odd "
"""Before the name of an arm."""
ARMS = (FULL, LOW, ODD + FULL, ODD + LOW)


@dataclasses.dataclass(frozen=True)
class Work:
    """What is timed, and how often.

    Attributes:
        seconds: that a turn should take.
    """

    shapes: Sequence[Shape]
    rounds: int = 15
    seconds: float = 0.04


QUICK = Work(shapes.QUICK, rounds=1, seconds=0.0)


@dataclasses.dataclass(frozen=True)
class Found:
    """What one shape showed. Each mapping is by the arm's name.

    Attributes:
        seconds: of a forward and its backward, a sample a round.
        left_out: seconds of one call, ten times slower than the fastest; it was timed once.
        predicted: seconds that the profile says; None without a profile that knows the call.
    """

    seconds: Mapping[str, list[float]]
    left_out: Mapping[str, float]
    predicted: Mapping[str, float | None]


def work_for(device: torch.device) -> Work:
    return Work(shapes.CUDA if device.type == "cuda" else shapes.CPU)


def low_of(device: torch.device) -> torch.dtype:
    """What "auto" means there: FP16 products have no fast kernels on most CPUs."""
    return torch.float16 if device.type == "cuda" else torch.bfloat16


def measure_all(work: Work, device: torch.device) -> dict[str, Found]:
    """Shape's name -> what it showed."""
    profile = load(device)
    return {shape.name: _measure(shape, work, device, profile) for shape in work.shapes}


def _measure(shape: Shape, work: Work, device: torch.device, profile: Profile | None) -> Found:
    low, wait = low_of(device), idle_wait(device)
    calls = {
        FULL: (shape.aligned, torch.float32),
        LOW: (shape.aligned, low),
        ODD + FULL: (shape.odd, torch.float32),
        ODD + LOW: (shape.odd, low),
    }
    arms = [Arm(arm, build(*call, device).both) for arm, call in calls.items()]
    for arm in arms:
        arm.step()  # kernels are chosen, and weights packed, in the first call
    left_out = far_behind(arms, wait=wait)
    kept = [arm for arm in arms if arm.name not in left_out]
    one = take_turns(kept, rounds=2, steps=1, wait=wait)
    steps = max(1, round(work.seconds / min(map(min, one.values()))))
    return Found(
        seconds=take_turns(kept, rounds=work.rounds, steps=steps, wait=wait),
        left_out=left_out,
        predicted={arm: _predicted(profile, *call) for arm, call in calls.items()},
    )


def _predicted(profile: Profile | None, point: Point, dtype: torch.dtype) -> float | None:
    if profile is None:
        return None
    return profile.seconds(
        point.kind, dtype, dict(zip(KINDS[point.kind].dims, point.dims, strict=True))
    )
