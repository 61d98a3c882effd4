"""Training by CTC, greedy decoding, and the rate of wrong characters."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...task import Metrics, Task
from ...ways import Trainer
from .data import BLANK, spelled, utterances
from .net import DeepSpeech, frames_out

__all__ = ["DEEP_SPEECH", "distance", "greedy"]

BATCH = 12
HELD_OUT = 400
STEPS = 400


def greedy(log_probabilities: Tensor, frames: Tensor) -> list[str]:
    """The best label of each frame; runs become one label, then blanks go.

    Args:
        log_probabilities: (T, B, labels).
        frames: (B,), how many of the T frames count.
    """
    best = log_probabilities.argmax(2).t().cpu()
    return [
        spelled(torch.unique_consecutive(row[:count]))
        for row, count in zip(best, frames.tolist(), strict=True)
    ]


def distance(one: Sequence[object], other: Sequence[object]) -> int:
    """The fewest insertions, deletions and substitutions that make one of the other."""
    above = [*range(len(other) + 1)]
    for i, mine in enumerate(one, 1):
        row = [i]
        for j, theirs in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (mine != theirs)))
        above = row
    return above[-1]


class _Training:
    def __init__(self, trainer: Trainer, seed: int) -> None:
        self._trainer = trainer
        self._net = trainer.model(DeepSpeech())
        self._optimizer = trainer.optimizer(
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
            [*self._net.parameters()],
            max_grad_norm=1.0,
        )
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, STEPS)
        self._batches = self._draw(seed)
        self._update = trainer.whole(self._train)

    def _draw(self, seed: int) -> Iterator[list[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        data = utterances()
        while True:
            order = HELD_OUT + torch.randperm(len(data.frames) - HELD_OUT, generator=generator)
            for chosen in order.split(BATCH)[:-1]:
                yield [part.to(self._trainer.device) for part in data[chosen]]

    def step(self) -> Tensor:
        loss = self._update(*next(self._batches))
        self._schedule.step()
        return loss

    def _train(
        self, spectrograms: Tensor, frames: Tensor, labels: Tensor, letters: Tensor
    ) -> Tensor:
        with self._trainer.forward():
            found = self._net(spectrograms, frames)
            loss = F.ctc_loss(found, labels, frames_out(frames), letters, BLANK)
        self._trainer.backward(loss)
        self._trainer.update(self._optimizer)
        return loss.detach()

    @torch.no_grad()
    def judge(self) -> Metrics:
        spectrograms, frames, labels, letters = (
            part.to(self._trainer.device) for part in utterances()[:HELD_OUT]
        )
        self._net.eval()
        found = self._net.forward(spectrograms, frames)
        self._net.train()
        loss = F.ctc_loss(found, labels, frames_out(frames), letters, BLANK).item()
        said = [spelled(row) for row in labels.cpu()]
        heard = greedy(found, frames_out(frames))
        wrong = sum(distance(a, b) for a, b in zip(heard, said, strict=True))
        return {
            "held-out loss": loss,
            "wrong characters, %": 100 * wrong / int(letters.sum()),
        }


DEEP_SPEECH = Task(
    name="Deep Speech 2",
    claim="speech recognition",
    data="generated: words spoken by gliding formants, with speakers and noise",
    metric="wrong characters, %",
    higher=False,
    steps=STEPS,
    start=_Training,
)
