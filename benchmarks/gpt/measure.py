"""Steps of all arms in turns in this process, then starts in processes of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.harness.timing import Arm, far_behind, idle_wait, take_turns

from .arms import AUTOCAST, HALF_AUTOCAST, OURS, STARTED, Trainee, Work
from .starts import measure_starts

__all__ = ["Measured", "measure_all"]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the arms showed. Each dict is by the arm's name.

    Attributes:
        losses: the first step's.
        saved: bytes that autograd keeps for the backward.
        lowered: whether anything runs low; for the arms that the verdicts are about.
        slow: seconds of a step, for those that are too slow to be timed any further.
        backward: seconds of forward and backward, a sample a round.
        update: the same with the optimizer's step.
        starts: "cold": what `first_step` found, "warm": a list of the same; empty if not measured.
    """

    losses: dict[str, float]
    saved: dict[str, int]
    lowered: dict[str, bool]
    slow: dict[str, float]
    backward: dict[str, list[float]]
    update: dict[str, list[float]]
    starts: dict[str, dict[str, Any]]


def measure_all(work: Work, device: torch.device) -> Measured:
    """Compile every arm, time those that are not far behind, then their starts."""
    arms = {name: Trainee(name, work, device) for name in work.arms}
    for trainee in arms.values():
        trainee.compile()
    losses = {name: float(trainee.step()) for name, trainee in arms.items()}
    saved = {name: trainee.saved_bytes() for name, trainee in arms.items()}
    lowered = {name: trainee.runs_low() for name, trainee in arms.items() if name in OURS}
    wait = idle_wait(device)
    behind = far_behind([Arm(name, trainee.step) for name, trainee in arms.items()], wait=wait)
    slow = {name: behind[name] for name in (AUTOCAST, HALF_AUTOCAST) if name in behind}
    timed_arms = {name: trainee for name, trainee in arms.items() if name not in slow}

    def timed(step: str) -> dict[str, list[float]]:
        turns = [Arm(name, getattr(trainee, step)) for name, trainee in timed_arms.items()]
        return take_turns(turns, rounds=work.rounds, steps=work.steps, wait=wait)

    backward = timed("step")
    update = timed("step_with_update")
    started = [name for name in STARTED if name in timed_arms]
    starts = measure_starts(work, device, started) if work.warm_starts else {}
    return Measured(losses, saved, lowered, slow, backward, update, starts)
