"""Forward and backward of any model, to be timed: compile FP32, compile + autocast, O1 and O2.

What `small` and `gpt` share. The peers are the two ways to train that a user of torch.compile has,
in FP32 and under autocast(bfloat16); which of them is faster depends on the model, and mpcompile
should not have to be told: each level is held against the better one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.harness.timing import auto_or
from benchmarks.harness.ways import Way, trainer_for
from benchmarks.models import Sample

FP32, AUTOCAST, O1, O2 = "compile FP32", "compile + autocast", "mpcompile O1", "mpcompile O2"
PEERS = (FP32, AUTOCAST)
OURS = (O1, O2)

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


def ways(device: torch.device) -> dict[str, Way]:
    """The arms, by name; with torch's fused optimizers where they have one."""
    low = auto_or(torch.bfloat16, device)
    found = (
        Way(FP32, compiled=True, fused=True),
        Way(AUTOCAST, torch.bfloat16, compiled=True, fused=True),
        Way(O1, low, "O1", fused=True),
        Way(O2, low, "O2", fused=True, generated=False),
    )
    return {way.name: way for way in found}


class Begun:
    """A model that returns its loss under one arm, on one fixed batch; its first step compiles."""

    def __init__(self, way: Way, timed: Timed, emit: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.trainer = trainer_for(way, emit, device)
        self.model = self.trainer.model(timed.build())
        self._batch = timed.sample.draw(device)

    def loss(self) -> torch.Tensor:
        with self.trainer.forward():
            loss: torch.Tensor = self.model(*self._batch)
        return loss

    def step(self) -> torch.Tensor:
        """Forward and backward; nothing waits for the device."""
        self.model.zero_grad()
        loss = self.loss()
        self.trainer.backward(loss)
        return loss.detach()
