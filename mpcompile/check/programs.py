"""The programs of `mpcompile check`: tiny trainings on a CPU, as data.

Each returns what must be alike on both sides: losses, gradients, and how far parameters moved.
Besides, it asserts what FP64 can't show, such as that a step was skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..torch_inside.private_names import Part
from . import models, steps, studies
from .sides import Results, Side

__all__ = ["PROGRAMS", "Program"]

FP16, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Program:
    """A program that shows whether a part of mpcompile is right.

    Attributes:
        about: what it is, as a phrase.
        part: what is switched off if it is wrong.
        run: returns tensors that must be alike on both sides.
        dtype: the low dtype.
        options: of `mpcompile()`.
        may_warn: the begin of a warning that is right here.
    """

    about: str
    part: Part
    run: Callable[[Side], Results]
    dtype: torch.dtype = FP16
    options: dict[str, Any] = field(default_factory=dict)
    may_warn: str | None = None

    @property
    def tolerance(self) -> float:
        """What rounding to the low dtype may do to numbers of these programs, relative."""
        return 0.08 if self.dtype is BF16 else 0.02


def _trains(net: Callable[[], nn.Module], *sizes: tuple[int, ...]) -> Callable[[Side], Results]:
    return lambda side: steps.trained(side, net(), sizes)


def _generated(net: Callable[[], nn.Module], *sizes: tuple[int, ...]) -> Callable[[Side], Results]:
    return lambda side: steps.trained(side, net(), sizes, generated=True)


_IMAGES, _ROWS = (4, 3, 6, 6), (8, 6)
_O2: dict[str, Any] = {"level": "O2"}
_INDUCTOR: dict[str, Any] = {"emit": "inductor"}

PROGRAMS = (
    Program("a step at O1 in FP16", Part.COMPILE, _trains(models.convolutions, _IMAGES, _IMAGES)),
    Program("a step at O1 in BF16", Part.COMPILE, _trains(models.layers, _ROWS, _ROWS), BF16),
    Program("a step at O2 in FP16", Part.COMPILE, _trains(models.layers, _ROWS, _ROWS), FP16, _O2),
    Program("sizes that change", Part.COMPILE, _trains(models.layers, (8, 6), (5, 6), (7, 6))),
    Program("a graph break", Part.COMPILE, _trains(models.Broken, _ROWS, _ROWS)),
    Program("an activation checkpoint", Part.COMPILE, _trains(models.Checkpointed, _ROWS)),
    Program("vmap", Part.COMPILE, _trains(models.Mapped, _ROWS, _ROWS)),
    Program("a method", Part.COMPILE, steps.method, FP16, {"dynamic": True}),
    Program("a step that is skipped", Part.COMPILE, steps.skipped),
    Program("a recurrent layer", Part.RECURRENT, _trains(models.Recurrent, (3, 5, 6), (3, 5, 6))),
    Program("MPOptimizer in BF16", Part.OPTIMIZER, _generated(models.layers, *[_ROWS] * 3), BF16),
    Program(
        "MPOptimizer at O2 in FP16", Part.OPTIMIZER,
        _generated(models.convolutions, *[_IMAGES] * 3), FP16, _O2,
    ),
    Program("MPOptimizer, a step that is skipped", Part.OPTIMIZER, steps.skipped_by_mp_optimizer),
    Program("a whole step", Part.WHOLE_STEP, steps.whole),
    Program(
        "a whole step that sets its lr", Part.WHOLE_STEP, steps.whole_with_lr,
        may_warn="mpcompile: step runs in pieces",
    ),
    Program("Inductor", Part.INDUCTOR, _trains(models.layers, _ROWS, _ROWS), FP16, _INDUCTOR),
    Program(
        "Inductor at O2 with MPOptimizer", Part.INDUCTOR,
        _generated(models.convolutions, *[_IMAGES] * 3), BF16, {**_O2, **_INDUCTOR},
    ),
    Program("repair=True", Part.WATCH, studies.repaired, FP16, {"repair": True}),
    Program("explain", Part.EXPLAIN, studies.explained),
    Program("diagnose", Part.EXPLAIN, studies.diagnosed),
    Program("DistributedDataParallel", Part.RANKS, steps.data_parallel),
)  # fmt: skip
