"""Training by teacher forcing, greedy decoding, and BLEU.

"Scaling Neural Machine Translation" (Ott et al., 2018) trains a transformer in FP16 with steps that
average the loss over about 400,000 words; a step here averages over about 313. So the gradient of
each activation is over 1000 times as large here. `TRANSFORMER_AS_AVERAGED` has gradients about as
small as there: its loss is divided by 1024, as for one of 1024 micro-batches, and so is all that
the optimizer compares gradients with. In exact arithmetic it is the same training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...task import Metrics, Task, Training
from ...ways import Trainer
from .corpus import BEGIN, END, PAD, corpus, words_of
from .lstm import LSTMTranslator
from .transformer import Transformer

__all__ = ["LSTM_ATTENTION", "TRANSFORMER", "TRANSFORMER_AS_AVERAGED", "bleu", "greedy"]

HELD_OUT = 400
MICRO_BATCHES = 1024


def greedy(net: Any, sources: Tensor, length: int) -> Tensor:
    """The most likely next word again and again: (B, at most length), int64, without BEGIN."""
    read = net.encode(sources)
    written = torch.full_like(sources[:, :1], BEGIN)
    for _ in range(length):
        following = net.decode(*read, written)[:, -1].argmax(1, keepdim=True)
        written = torch.cat([written, following], 1)
        if bool((written == END).any(1).all()):
            break
    return written[:, 1:]


def bleu(found: list[str], wanted: list[str]) -> float:
    """Of a corpus, 0 to 100; sentences are words with spaces between."""
    import sacrebleu  # no other benchmark needs it

    return sacrebleu.corpus_bleu(found, [wanted], tokenize="none", force=True).score


def noam(warmup: int, step: int) -> float:
    """Of the highest rate: up in a line for `warmup` steps, then down as the inverse root."""
    return min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


def _down(steps: int, step: int) -> float:
    """Of the first rate: as it is for half of the steps, then down in a line."""
    return max(0.0, min(1.0, 2 * (1 - step / steps)))


@dataclasses.dataclass(frozen=True)
class _Recipe:
    net: Callable[[int, int], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    schedule: Callable[[int], float]
    batch: int
    label_smoothing: float = 0.0
    micro_batches: int = 1

    def __call__(self, trainer: Trainer, seed: int) -> Training:
        return _Training(self, trainer, seed)


class _Training:
    def __init__(self, recipe: _Recipe, trainer: Trainer, seed: int) -> None:
        self._recipe, self._trainer = recipe, trainer
        data = corpus()
        self._net = trainer.model(recipe.net(len(data.source_words), len(data.target_words)))
        self._optimizer = trainer.optimizer(
            recipe.optimizer, [*self._net.parameters()], max_grad_norm=1 / recipe.micro_batches
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, recipe.schedule)
        self._batches = self._draw(seed)
        self._update = trainer.whole(self._train)

    def _draw(self, seed: int) -> Iterator[list[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        data = corpus()
        while True:
            order = HELD_OUT + torch.randperm(len(data.sources) - HELD_OUT, generator=generator)
            for chosen in order.split(self._recipe.batch)[:-1]:
                yield [part.to(self._trainer.device) for part in data[chosen]]

    def step(self) -> Tensor:
        loss = self._update(*next(self._batches))
        self._schedule.step()
        return loss

    def _train(self, sources: Tensor, targets: Tensor) -> Tensor:
        with self._trainer.forward():
            logits = self._net(sources, targets[:, :-1])
            loss = _loss(logits, targets, self._recipe.label_smoothing)
        self._trainer.backward(loss / self._recipe.micro_batches)
        self._trainer.update(self._optimizer)
        return loss.detach()

    @torch.no_grad()
    def judge(self) -> Metrics:
        data = corpus()
        sources, targets = (part.to(self._trainer.device) for part in data[:HELD_OUT])
        logits = self._net.forward(sources, targets[:, :-1])
        following = targets[:, 1:]
        right = (logits.argmax(2) == following)[following != PAD].float().mean().item()
        found = greedy(self._net, sources, following.shape[1])
        sentences = (
            [words_of(row, data.target_words) for row in rows] for rows in (found, following)
        )
        return {
            "held-out loss": _loss(logits, targets).item(),
            "right words, %": 100 * right,
            "BLEU": bleu(*sentences),
        }


def _loss(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Logits (B, T, words) against targets (B, 1 + T), which begin with BEGIN."""
    return F.cross_entropy(
        logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=PAD,
        label_smoothing=label_smoothing,
    )  # fmt: skip


_STEPS = 500
_DATA = "generated: sentences of a grammar, and their transfer to one with the verb last"

LSTM_ATTENTION = Task(
    name="LSTM with attention",
    claim="machine translation",
    data=_DATA,
    metric="BLEU",
    higher=True,
    steps=_STEPS,
    start=_Recipe(
        LSTMTranslator,
        functools.partial(torch.optim.Adam, lr=8e-3),
        functools.partial(_down, _STEPS),
        batch=24,
    ),
)

_TRANSFORMER = _Recipe(
    Transformer,
    functools.partial(torch.optim.Adam, lr=5e-3, betas=(0.9, 0.98), eps=1e-9),
    functools.partial(noam, 60),
    batch=24,
    label_smoothing=0.1,
)

TRANSFORMER = Task(
    name="Transformer",
    claim="machine translation",
    data=_DATA,
    metric="BLEU",
    higher=True,
    steps=600,
    start=_TRANSFORMER,
)

TRANSFORMER_AS_AVERAGED = dataclasses.replace(
    TRANSFORMER,
    name="Transformer, 320000 words",
    start=dataclasses.replace(
        _TRANSFORMER,
        optimizer=functools.partial(
            torch.optim.Adam, lr=5e-3, betas=(0.9, 0.98), eps=1e-9 / MICRO_BATCHES
        ),
        micro_batches=MICRO_BATCHES,
    ),
)
