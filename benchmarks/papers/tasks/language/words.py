"""A big LSTM, made small: projections, a sampled softmax, Adagrad.

The network is the "BIG LSTM" of "Exploring the Limits of Language Modeling" (Jozefowicz et al.,
2016), which "Mixed Precision Training" trains: two LSTM layers whose states are projected to fewer
numbers, dropout between layers, a softmax over the right word and some drawn by Zipf's law, whose
logits are corrected by the chance of being drawn; Adagrad with a rate of 0.2, gradients clipped to
a norm of 1. The state of one batch is where the next one starts.

A step of the paper's averages the loss over 20,480 words (1024 rows of 20), one here over 640. So
the gradient of each activation is 32 times as large here. `BIG_LSTM_AS_AVERAGED` has gradients as
small as the paper's: its loss is divided by 32, as for one of 32 micro-batches, and so is all that
the optimizer compares gradients with. In exact arithmetic it is the same training.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...task import Metrics, Probe, Task
from ...ways import Trainer
from .vocabulary import chances, draw, words

__all__ = ["BIG_LSTM", "BIG_LSTM_AS_AVERAGED", "BigLSTM"]

CELLS, WIDTH, LAYERS = 128, 64, 2
BATCH, TIME, DRAWN = 32, 20, 512
STEPS = 750
DROPOUT = 0.1
MICRO_BATCHES = 32


class BigLSTM(nn.Module):
    """Words (B, T), the following ones (B, T), drawn ones (S,), the layers' states (2, B, WIDTH)
    and (2, B, CELLS) -> logits of the following word and the drawn ones (B * T, 1 + S), and the
    states at the end.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(count, WIDTH)
        self.lstm = nn.LSTM(
            WIDTH, CELLS, LAYERS, batch_first=True, dropout=DROPOUT, proj_size=WIDTH
        )
        self.drop = nn.Dropout(DROPOUT)
        self.head = nn.Linear(WIDTH, count)
        self.register_buffer("chances", chances(count), persistent=False)

    def forward(
        self, read: Tensor, following: Tensor, drawn: Tensor, hidden: Tensor, cells: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        states, hidden, cells = self.states(read, hidden, cells)
        states, following = states.flatten(0, 1), following.flatten()
        right = (states * self.head.weight[following]).sum(1, keepdim=True)
        right = right + self._offset(following).unsqueeze(1)
        others = F.linear(states, self.head.weight[drawn], self._offset(drawn))
        # A drawn word that is the right one counts once.
        others = others.masked_fill(following.unsqueeze(1) == drawn, float("-inf"))
        return torch.cat([right, others], 1), hidden, cells

    def states(self, read: Tensor, hidden: Tensor, cells: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the last layer says of each place (B, T, WIDTH), and the states at the end."""
        states, (hidden, cells) = self.lstm(self.drop(self.embedding(read)), (hidden, cells))
        return self.drop(states), hidden, cells

    def _offset(self, chosen: Tensor) -> Tensor:
        """The bias of words, less the log of how often each is expected among those drawn."""
        assert isinstance(self.chances, Tensor)
        return self.head.bias[chosen] - (DRAWN * self.chances[chosen]).log()


def sampled_loss(logits: Tensor) -> Tensor:
    """Cross entropy of logits (N, 1 + S), of which the first is the right one."""
    return F.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.int64))


def _begin(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.zeros(LAYERS, batch, WIDTH, device=device),
        torch.zeros(LAYERS, batch, CELLS, device=device),
    )


class _Training:
    def __init__(self, trainer: Trainer, seed: int, micro_batches: int = 1) -> None:
        self._trainer, self._share = trainer, 1 / micro_batches
        self._net = trainer.model(BigLSTM(words().count))
        adagrad = functools.partial(
            torch.optim.Adagrad,
            lr=0.2, initial_accumulator_value=self._share**2, eps=1e-10 * self._share,
        )  # fmt: skip
        self._optimizer = trainer.optimizer(
            adagrad, [*self._net.parameters()], max_grad_norm=self._share
        )
        self._state = _begin(BATCH, trainer.device)
        self._batches = self._draw(seed)
        self._update = trainer.whole(self._train)

    def _draw(self, seed: int) -> Iterator[list[Tensor]]:
        """Rows of the text, one below the other, from another place in each pass over it."""
        generator = torch.Generator().manual_seed(seed)
        data = words()
        while True:
            shift = int(torch.randint(len(data.train), (), generator=generator))
            rows = data.train.roll(shift)
            rows = rows[: len(rows) // BATCH * BATCH].view(BATCH, -1)
            for start in range(0, rows.shape[1] - TIME, TIME):
                window = rows[:, start : start + TIME + 1]
                drawn = draw(DRAWN, data.count, generator)
                batch = (window[:, :-1].contiguous(), window[:, 1:].contiguous(), drawn)
                yield [part.to(self._trainer.device) for part in batch]

    def step(self) -> Tensor:
        loss, *state = self._update(*next(self._batches), *self._state)
        self._state = (state[0], state[1])
        return loss

    def _train(
        self, read: Tensor, following: Tensor, drawn: Tensor, hidden: Tensor, cells: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        with self._trainer.forward():
            logits, hidden, cells = self._net(read, following, drawn, hidden, cells)
            loss = sampled_loss(logits)
        self._trainer.backward(loss * self._share)
        self._trainer.update(self._optimizer)
        return loss.detach(), hidden.detach(), cells.detach()

    def probe(self) -> Probe:
        inputs = (*next(self._batches), *self._state)
        return Probe(self._net, inputs, lambda result: sampled_loss(result[0]))

    @torch.no_grad()
    def judge(self) -> Metrics:
        """The full softmax, over the held-out text as ten rows."""
        self._net.eval()
        text = words().held_out
        rows = text[: len(text) // 10 * 10].view(10, -1).to(self._trainer.device)
        states, *_ = self._net.states(rows[:, :-1], *_begin(10, self._trainer.device))
        logits = self._net.head(states).flatten(0, 1)
        loss = F.cross_entropy(logits, rows[:, 1:].flatten()).item()
        return {"held-out loss": loss, "perplexity": math.exp(loss)}


BIG_LSTM = Task(
    name="Big LSTM",
    claim="language model",
    data="Python's documentation, as words; the last tenth is held out",
    metric="perplexity",
    higher=False,
    steps=STEPS,
    start=_Training,
)

BIG_LSTM_AS_AVERAGED = dataclasses.replace(
    BIG_LSTM,
    name="Big LSTM, 20480 words",
    start=functools.partial(_Training, micro_batches=MICRO_BATCHES),
)
