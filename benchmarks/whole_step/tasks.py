"""What is trained: models, batches, and the training step that all arms share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.ways import Trainer
from benchmarks.models import (
    MLP,
    Discriminator,
    Generator,
    Sample,
    Tagger,
    pixels,
    resnet18,
    tokens,
)
from mpcompile.demo.gpt import GPT, GPTConfig

DTYPES: Mapping[str, torch.dtype] = {"FP16": torch.float16, "BF16": torch.bfloat16}

TrainStep = Callable[..., Tensor]
MakeStep = Callable[[Trainer, Sequence[nn.Module], Sequence[Any]], TrainStep]
"""(what trains, the models, their optimizers) -> the training step."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A training step.

    Attributes:
        build: the models; each gets an AdamW.
        draw: a batch, on the CPU.
        make: the step of the models.
        steps: how many make a sample.
        dtypes: names of the low dtypes that it is run in.
        starts: whether its starts are timed, in the first of these dtypes.
    """

    name: str
    build: Callable[[], Sequence[nn.Module]]
    draw: Callable[[], Sequence[Tensor]]
    make: MakeStep
    steps: int
    dtypes: tuple[str, ...] = tuple(DTYPES)
    starts: bool = False


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured, and how often."""

    tasks: Sequence[Task]
    rounds: int = 30
    emit: str = "inductor"

    @property
    def rows(self) -> dict[str, tuple[Task, str]]:
        """The rows of the report: a task in the dtype of that name."""
        return {
            f"{task.name}, {dtype}": (task, dtype) for task in self.tasks for dtype in task.dtypes
        }


def _one_model(
    trainer: Trainer, models: Sequence[nn.Module], optimizers: Sequence[Any]
) -> TrainStep:
    """Of a model that returns its loss."""
    (model,), (optimizer,) = models, optimizers

    def train_step(*batch: Tensor) -> Tensor:
        with trainer.forward():
            loss: Tensor = model(*batch)
        # Before the backward: torch.compile leaves it out of the graph of a loss that is still read
        # when the graph breaks.
        result = loss.detach()
        trainer.backward(loss)
        trainer.update(optimizer)
        return result

    return train_step


def _gan(trainer: Trainer, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> TrainStep:
    """Of a generator, which learns first, and a discriminator; returns the sum of their losses.

    No two backwards go through one forward: torch.compile would make one graph of what they share,
    and free it in the first.
    """
    generator, discriminator = models
    step_g, step_d = optimizers

    def judge(images: Tensor, label: float) -> Tensor:
        with trainer.forward():
            logits = discriminator(images)
            return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))

    def train_step(images: Tensor, noise: Tensor) -> Tensor:
        with trainer.forward():
            made = generator(noise)
        fooled = judge(made, 1.0)
        result = fooled.detach()
        trainer.backward(fooled)
        trainer.step(step_g)
        step_d.zero_grad()
        told = judge(images, 1.0) + judge(made.detach(), 0.0)
        result = result + told.detach()
        trainer.backward(told)
        trainer.update(step_d)
        return result

    return train_step


def _sampled(
    name: str, build: Callable[[], nn.Module], sample: Sample, steps: int, *dtypes: str,
    starts: bool = False,
) -> Task:  # fmt: skip
    """A model that returns its loss, and a batch of random numbers."""
    draw = functools.partial(sample.draw, torch.device("cpu"))
    return Task(name, lambda: [build()], draw, _one_model, steps, dtypes or tuple(DTYPES), starts)


def _mlp(width: int, batch: int, steps: int, *, starts: bool = False) -> Task:
    build = functools.partial(MLP, inputs=width, width=width)
    sample = Sample((batch, width), (batch,), 10)
    return _sampled(f"MLP {width}", build, sample, steps, starts=starts)


def _gpt(
    name: str, config: GPTConfig, batch: int, steps: int, *dtypes: str, starts: bool = False
) -> Task:
    build = functools.partial(GPT, config)
    sample = tokens(batch, config.context, config.vocab, config.vocab)
    return _sampled(name, build, sample, steps, *dtypes, starts=starts)


def dcgan(
    name: str, width: int, batch: int, steps: int, *dtypes: str, starts: bool = False
) -> Task:
    """DCGAN on images of 64 x 64."""

    def draw() -> Sequence[Tensor]:
        return torch.rand(batch, 3, 64, 64) * 2 - 1, torch.randn(batch, 100, 1, 1)

    def build() -> Sequence[nn.Module]:
        return Generator(width=width), Discriminator(width=width)

    return Task(name, build, draw, _gan, steps, dtypes, starts)


_NARROW = GPTConfig(vocab=128, context=32, width=32, layers=2, heads=2)
_TAGGER = tokens(8, 16, 256, 16)

# In FP16 the loss is scaled. On a CPU wide products run in BF16 alone, and oneDNN has no FP16 LSTM.
CPU = Work(
    tasks=(
        _mlp(64, 16, 100, starts=True),
        _mlp(512, 64, 20),
        _sampled("LSTM tagger", Tagger, _TAGGER, 30, "BF16"),
        _gpt("GPT 32 wide", _NARROW, 4, 30),
        dcgan("DCGAN", 16, 8, 4, "BF16", starts=True),
        _gpt("GPT of the demo", GPTConfig(), 8, 2, "BF16", starts=True),
        _sampled("ResNet-18 at 32 pixels", resnet18, pixels(16, 32), 2, "BF16", starts=True),
    )
)  # fmt: skip
# Fewer: everything must be compiled and timed within some minutes.
CUDA = Work(
    tasks=(
        _mlp(64, 16, 50),
        _gpt("GPT of the demo", GPTConfig(), 32, 20, "FP16"),
        dcgan("DCGAN", 64, 64, 20, "FP16"),
    ),
    rounds=20,
)
TINY = Work(
    tasks=(
        _sampled("MLP 8", functools.partial(MLP, inputs=8, width=8, layers=1),
                 Sample((4, 8), (4,), 10), 1, "FP16"),
        _sampled("LSTM tagger", functools.partial(Tagger, width=8),
                 tokens(2, 4, 256, 16), 1, "BF16"),
    ),
    rounds=2,
    emit="eager",
)  # fmt: skip


def work_for(device: torch.device) -> Work:
    """The full size on this type of device."""
    return CUDA if device.type == "cuda" else CPU
