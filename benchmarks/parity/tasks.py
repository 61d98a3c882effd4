"""The two trainings: a convolutional net on digits, a GPT on text."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.digits import digits
from mpcompile.demo import GPT, GPTConfig, corpus, held_out_batches, text_batches

__all__ = ["TASKS", "Metrics", "Task"]

Batch = tuple[Tensor, Tensor]
Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Task:
    """One training: what it needs, and how the result is judged.

    Attributes:
        model: makes it, its weights drawn from torch's global generator.
        batches: the training data in the order of a seed, `steps` of them.
        loss: of a batch, through `model(...)` as a user would call it.
        optimizer, peak: makes it for some parameters; its highest learning rate.
        judge: metrics of a trained model. Calls `model.forward`, which is never compiled.
        grains: metric -> the smallest spread that means anything.
    """

    name: str
    steps: int
    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    peak: float
    judge: Callable[[nn.Module], Metrics]
    grains: Metrics


class _ConvNet(nn.Module):
    """Images (B, 1, 8, 8) -> logits (B, 10): conv, batch norm, ReLU, pooling, linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *self._block(1, 16), *self._block(16, 32), nn.MaxPool2d(2),
            *self._block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(64, 10)

    @staticmethod
    def _block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def _digits(steps: int, device: torch.device) -> Task:
    (train_x, train_y), (test_x, test_y) = digits(device)
    train_x, test_x = (x.reshape(-1, 1, 8, 8) for x in (train_x, test_x))
    batch = 64

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        epochs = (torch.randperm(len(train_x), generator=generator) for _ in itertools.count())
        full = (part for epoch in epochs for part in epoch.split(batch) if len(part) == batch)
        for chosen in itertools.islice(full, steps):
            yield train_x[chosen.to(device)], train_y[chosen.to(device)]

    @torch.no_grad()
    def judge(model: nn.Module) -> Metrics:
        model.eval()
        logits = model.forward(test_x)
        return {
            "test loss": F.cross_entropy(logits, test_y).item(),
            "test accuracy, %": 100 * (logits.argmax(1) == test_y).double().mean().item(),
        }

    return Task(
        name="Convolutional net on digits",
        steps=steps,
        model=_ConvNet,
        batches=batches,
        loss=lambda model, x, y: F.cross_entropy(model(x), y),
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.05, momentum=0.9, weight_decay=5e-4
        ),
        peak=0.05,
        judge=judge,
        grains={"test accuracy, %": 100 / len(test_y)},
    )


def _text(steps: int, device: torch.device) -> Task:
    # All widths at most 256: FP16 products have no fast kernels on CPUs.
    size = GPTConfig(vocab=128, context=64, width=64, layers=2, heads=2)
    text = corpus()
    train, held_out = (
        part.where(part < size.vocab, ord("?")) for part in (text.train, text.held_out)
    )
    batch = 8

    def batches(seed: int) -> Iterator[Batch]:
        endless = text_batches(train, batch=batch, context=size.context, seed=seed)
        for idx, targets in itertools.islice(endless, steps):
            yield idx.to(device), targets.to(device)

    @torch.no_grad()
    def judge(model: nn.Module) -> Metrics:
        parts = held_out_batches(held_out, batch=batch, context=size.context, limit=32)
        losses = [model.forward(idx.to(device), y.to(device)).item() for idx, y in parts]
        return {"held-out loss": statistics.fmean(losses)}

    return Task(
        name="GPT on documentation",
        steps=steps,
        model=lambda: GPT(size),
        batches=batches,
        loss=lambda model, idx, targets: model(idx, targets),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
        peak=3e-3,
        judge=judge,
        grains={},
    )


TASKS: tuple[tuple[Callable[[int, torch.device], Task], int], ...] = (
    (_digits, 300),
    (_text, 400),
)
