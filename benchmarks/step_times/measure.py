"""The arms, and each model timed under them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.harness.timing import Arm, far_behind, idle_wait, low_dtype, take_turns
from benchmarks.models import Sample
from mpcompile import mpcompile

__all__ = [
    "AUTOCAST",
    "FP32",
    "O1",
    "O2",
    "OURS",
    "PEERS",
    "Measured",
    "Timed",
    "Work",
    "measure_all",
]

FP32, AUTOCAST, O1, O2 = "compile FP32", "compile + autocast", "mpcompile O1", "mpcompile O2"
PEERS = (FP32, AUTOCAST)
OURS = (O1, O2)
ARMS = (*PEERS, *OURS)

REFUSED = "could not create a primitive"
"""What oneDNN says of a BF16 LSTM on a CPU with AVX2: torch's own autocast fails there."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """A model, its batch, and how many steps make a sample."""

    name: str
    build: Callable[[], nn.Module]
    sample: Sample
    steps: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What is timed, and how often."""

    models: Sequence[Timed]
    rounds: int = 20
    emit: str = "inductor"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the models showed.

    Attributes:
        seconds: model -> arm -> seconds per step, a sample a round.
        losses: model -> arm -> the first step's.
        left_out: sentences, which arm of which model is not timed and why.
    """

    seconds: dict[str, dict[str, list[float]]] = dataclasses.field(default_factory=dict)
    losses: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)


def measure_all(work: Work, device: torch.device) -> Measured:
    """Time each model under every arm, one model after the other."""
    found = Measured()
    for model in work.models:
        steps = {arm: _step(model, arm, work.emit, device) for arm in ARMS}
        found.losses[model.name] = {}
        for arm, step in list(steps.items()):
            try:
                found.losses[model.name][arm] = float(step())
            except RuntimeError as error:
                if arm != AUTOCAST or REFUSED not in str(error):
                    raise
                del steps[arm]
                why = f"{model.name}: {arm} can't run here, torch says: {error}."
                found.left_out.append(why)
        turns = [Arm(arm, step) for arm, step in steps.items()]
        spent = far_behind(turns, wait=idle_wait(device)).get(AUTOCAST)
        if spent is not None:
            turns = [turn for turn in turns if turn.name != AUTOCAST]
            found.left_out.append(f"{model.name}: {AUTOCAST} takes {spent:.1f} s a step; left out.")
        found.seconds[model.name] = take_turns(
            turns, rounds=work.rounds, steps=model.steps, settle=max(1, model.steps // 4),
            wait=idle_wait(device),
        )  # fmt: skip
    return found


def _step(timed: Timed, arm: str, emit: str, device: torch.device) -> Callable[[], Any]:
    """Forward and backward of one compiled model on one fixed batch; returns the loss."""
    torch.manual_seed(0)
    model = timed.build().to(device)
    x, targets = timed.sample.draw(device)
    if arm in OURS:
        level = arm.rpartition(" ")[2]
        mpcompile(model, dtype=low_dtype(device), level=level, emit=emit, strict=True)
    else:
        model.compile(backend=emit)

    def step() -> torch.Tensor:
        model.zero_grad()
        low = torch.autocast(device.type, torch.bfloat16)
        with low if arm == AUTOCAST else contextlib.nullcontext():
            loss: torch.Tensor = model(x, targets)
        loss.backward()
        return loss.detach()

    return step
