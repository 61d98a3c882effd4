"""What a row of the table is: a task, and a training of it that a way has begun."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.harness.timing import spans
from benchmarks.harness.ways import Trainer, Way, trainer_for

FP32 = Way("FP32")
UNSCALED = Way("FP16 O2, no loss scale", torch.float16, "O2", scaled=False)
QUALITY = (
    FP32,
    UNSCALED,
    Way("FP16 O1", torch.float16, "O1"),
    Way("FP16 O2", torch.float16, "O2"),
    Way("BF16 O1", torch.bfloat16, "O1"),
    Way("BF16 O2", torch.bfloat16, "O2"),
)
"""What is trained to the end."""


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


class OneModel:
    """The training of one model by one optimizer: what most rows share.

    Args:
        make: of the optimizer, as `Trainer.optimizer` takes it.
        max_grad_norm: gradients are clipped to it in each step.
        schedule: makes the schedule of the learning rate for the optimizer.
        share: of the loss, that goes backward.
    """

    def __init__(
        self,
        trainer: Trainer,
        seed: int,
        net: nn.Module,
        make: Callable[..., torch.optim.Optimizer],
        *,
        max_grad_norm: float | None = None,
        schedule: Callable[[Any], torch.optim.lr_scheduler.LRScheduler] | None = None,
        share: float = 1.0,
    ) -> None:
        self._trainer, self._device, self._share = trainer, trainer.device, share
        self._net: Any = trainer.model(net)
        self._optimizer = trainer.optimizer(make, [*self._net.parameters()], max_grad_norm)
        self._schedule = schedule(self._optimizer) if schedule else None
        self._batches = self._draw(seed)
        self._update = trainer.whole(self._train)

    def _draw(self, seed: int) -> Iterator[Sequence[Any]]:
        """Batches in the order of a seed, without an end: the arguments of `_loss`."""
        raise NotImplementedError

    def _shuffled(
        self, seed: int, data: Any, count: int, held_out: int, batch: int
    ) -> Iterator[list[Tensor]]:
        """Of the `count` examples of `data`, but for the first ones: each pass in another order."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = held_out + torch.randperm(count - held_out, generator=generator)
            for chosen in order.split(batch)[:-1]:
                yield [part.to(self._device) for part in data[chosen]]

    def _loss(self, *batch: Any) -> Tensor:
        """Forward and loss, as they stand in the loop; `judge` has its own."""
        raise NotImplementedError

    def step(self) -> Tensor:
        loss: Tensor = self._update(*next(self._batches))
        if self._schedule is not None:
            self._schedule.step()
        return loss

    def _train(self, *batch: Any) -> Tensor:
        with self._trainer.forward():
            loss = self._loss(*batch)
        self._trainer.backward(loss * self._share if self._share != 1 else loss)
        self._trainer.update(self._optimizer)
        return loss.detach()


def one_cycle(peak: float, steps: int) -> Callable[[Any], torch.optim.lr_scheduler.LRScheduler]:
    """Of a learning rate that rises to `peak` and falls; who times steps may take more of them."""

    class Cycle(torch.optim.lr_scheduler.OneCycleLR):
        def step(self, epoch: int | None = None) -> None:
            if self.last_epoch < steps:
                super().step(epoch)

    return lambda optimizer: Cycle(optimizer, peak, steps + 1, cycle_momentum=False)


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


# -- training --------------------------------------------------------------------------------------
# One training: a task, a way, a seed.


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        metrics: of data held out, and "last training loss": the mean over the last tenth.
        curve: training loss, means over equal spans of the steps.
        scales: for each model with a loss scale, (the scale at the end, steps skipped).
        seconds: all of it, with compiling and judging.
    """

    metrics: Metrics
    curve: list[float]
    scales: list[tuple[float, int]]
    seconds: float


def train(
    task: Task, way: Way, seed: int, emit: str, device: torch.device, steps: int | None = None
) -> Outcome:
    """Train from a seed; `steps` in place of the task's."""
    start = time.perf_counter()
    torch._dynamo.reset()  # each run compiles again: no limit on recompilations is reached
    torch.manual_seed(seed)
    trainer = trainer_for(way, emit, device)
    training = task.start(trainer, seed)
    losses = [training.step().item() for _ in range(steps or task.steps)]
    last = losses[-max(1, len(losses) // 10) :]
    return Outcome(
        metrics={"last training loss": statistics.fmean(last), **training.judge()},
        curve=spans(losses),
        scales=trainer.scales(),
        seconds=time.perf_counter() - start,
    )
