"""What a row of the table is: a task, and a training of it that a way has begun."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from .ways import Trainer

__all__ = ["Metrics", "Probe", "Task", "Training"]

Metrics = dict[str, float]


class Training(Protocol):
    """A model, or several, in training. Some have a method `probe`, which returns a `Probe`."""

    def step(self) -> Tensor:
        """One step on the next batch; returns its loss, 0-d and detached.

        Every way runs this code. It calls the trainer where a user of plain PyTorch would call
        `backward`, `clip_grad_norm_`, `optimizer.step` and `zero_grad`, and computes forward and
        loss inside `trainer.forward()`.
        """

    def judge(self) -> Metrics:
        """Metrics over data held out from training.

        By an eager FP32 forward (`model.forward`, which is never compiled), so that every way is
        judged by the same code. NaN where the weights are.
        """


@dataclasses.dataclass(frozen=True)
class Probe:
    """What `mpcompile.diagnosis.diagnose` needs to look at the next step of a training.

    Attributes:
        model, inputs: for a call on the next batch.
        loss: of what the call returns.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[Any], Tensor]


@dataclasses.dataclass(frozen=True)
class Task:
    """One row.

    Attributes:
        name: of the network, as in the paper.
        claim: the paper's section: "classification", "detection", ...
        data: which data, in one sentence: from which package, or how it is generated.
        metric: the one that the table shows; a key of what `judge` returns.
        higher: whether a higher value of it is better.
        steps: of a training.
        start: (trainer, seed) -> the training. Calls `trainer.model` for each model and
            `trainer.optimizer` for each optimizer, in the order of a user's script. The seed sets
            the order of the data; torch's global generator, seeded before, sets the weights.
        grains: metric -> the smallest spread that means anything, such as one image's share.
        needs: packages beside the project's own, without which it isn't trained.
    """

    name: str
    claim: str
    data: str
    metric: str
    higher: bool
    steps: int
    start: Callable[[Trainer, int], Training]
    grains: Mapping[str, float] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The name of the module that it is written in."""
        start = self.start
        return (start.func if isinstance(start, functools.partial) else start).__module__

    @property
    def lacking(self) -> str:
        """The packages that it needs and that aren't installed; "" if there are none."""
        return ", ".join(name for name in self.needs if importlib.util.find_spec(name) is None)
