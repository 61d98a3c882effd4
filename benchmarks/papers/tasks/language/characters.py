"""A GPT on the characters of Python's documentation: the demo's, narrow.

A step of GPT-2's averages the loss over 2^19 tokens, one here over 2^9. So the gradient of each
activation is 1024 times as large here. `GPT_AS_AVERAGED` has gradients as small as GPT-2's: its
loss is divided by 1024, as for one of 1024 micro-batches, and so is all that the optimizer compares
gradients with. In exact arithmetic it is the same training.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from mpcompile.demo import GPT, GPTConfig, corpus, held_out_batches, text_batches

from ...task import Metrics, Task
from ...ways import Trainer

__all__ = ["GPT_AS_AVERAGED", "GPT_TASK"]

SIZE = GPTConfig(vocab=128, context=64, width=64, layers=2, heads=2)
BATCH, STEPS = 8, 600
MICRO_BATCHES = 1024


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    """What is trained on, what is held out: ASCII, with ? for anything else."""
    text = corpus()
    train, held_out = (
        part.where(part < SIZE.vocab, ord("?")) for part in (text.train, text.held_out)
    )
    return train, held_out


class _Training:
    def __init__(self, trainer: Trainer, seed: int, micro_batches: int = 1) -> None:
        self._trainer, self._share = trainer, 1 / micro_batches
        self._net = trainer.model(GPT(SIZE))
        adamw = functools.partial(
            torch.optim.AdamW, lr=3e-3, weight_decay=0.1, eps=1e-8 * self._share
        )
        self._optimizer = trainer.optimizer(
            adamw, [*self._net.parameters()], max_grad_norm=self._share
        )
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, 3e-3, STEPS + 1, cycle_momentum=False
        )
        self._batches = self._draw(seed)
        self._update = trainer.whole(self._train)

    def _draw(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        batches = text_batches(_text()[0], batch=BATCH, context=SIZE.context, seed=seed)
        for batch in batches:
            yield tuple(part.to(self._trainer.device) for part in batch)

    def step(self) -> Tensor:
        loss = self._update(*next(self._batches))
        if self._schedule.last_epoch < STEPS:  # who times steps may take more of them
            self._schedule.step()
        return loss

    def _train(self, idx: Tensor, targets: Tensor) -> Tensor:
        with self._trainer.forward():
            loss = self._net(idx, targets)
        self._trainer.backward(loss * self._share)
        self._trainer.update(self._optimizer)
        return loss.detach()

    @torch.no_grad()
    def judge(self) -> Metrics:
        parts = held_out_batches(_text()[1], batch=BATCH, context=SIZE.context, limit=64)
        device = self._trainer.device
        losses = [self._net.forward(idx.to(device), y.to(device)).item() for idx, y in parts]
        loss = statistics.fmean(losses)
        return {"held-out loss": loss, "perplexity": math.exp(loss)}


GPT_TASK = Task(
    name="GPT",
    claim="language model",
    data="Python's documentation, as characters; the last tenth is held out",
    metric="perplexity",
    higher=False,
    steps=STEPS,
    start=_Training,
)

GPT_AS_AVERAGED = dataclasses.replace(
    GPT_TASK,
    name="GPT, 2^19 tokens",
    start=functools.partial(_Training, micro_batches=MICRO_BATCHES),
)
