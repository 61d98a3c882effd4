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

import collections
import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.harness.ways import Trainer
from benchmarks.papers.task import Metrics, OneModel, Probe, Task, one_cycle
from mpcompile.demo import GPT, GPTConfig, corpus, text_batches

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


class _Training(OneModel):
    def __init__(self, trainer: Trainer, seed: int, micro_batches: int = 1) -> None:
        share = 1 / micro_batches
        adagrad = functools.partial(
            torch.optim.Adagrad,
            lr=0.2, initial_accumulator_value=share**2, eps=1e-10 * share,
        )  # fmt: skip
        net = BigLSTM(words().count)
        super().__init__(trainer, seed, net, adagrad, max_grad_norm=share, share=share)
        self._state = _begin(BATCH, trainer.device)

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
                yield [part.to(self._device) for part in batch]

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
        rows = text[: len(text) // 10 * 10].view(10, -1).to(self._device)
        states, *_ = self._net.states(rows[:, :-1], *_begin(10, self._device))
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


# -- vocabulary ------------------------------------------------------------------------------------
# The words of Python's documentation, the frequent ones first, and how others are drawn.

UNKNOWN = 0
"""What a word is that the training part has fewer than three times: the most frequent "word"."""
LEAST = 3


@dataclasses.dataclass(frozen=True)
class Words:
    """A text cut in two, as numbers of words: int64, (N,) and (M,).

    Attributes:
        count: of different words; a word's number is its rank.
    """

    train: Tensor
    held_out: Tensor
    count: int


def _cut() -> tuple[Tensor, Tensor]:
    """The demo's text, as bytes: whole topics of it, the last tenth, are held out."""
    text = corpus()
    return text[: (at := int(0.9 * len(text)))], text[at:]


@functools.cache
def words() -> Words:
    """Words in lower case, numbers and signs; the last tenth of the text is held out."""
    train, held_out = (
        re.findall(r"[a-z_]+|[0-9]+|[^\sa-z_0-9]", bytes(part.tolist()).decode().lower())
        for part in _cut()
    )
    counts = collections.Counter(train).most_common()
    frequent = [word for word, count in counts if count >= LEAST]
    number = {word: UNKNOWN + 1 + rank for rank, word in enumerate(frequent)}
    numbers = (
        torch.tensor([number.get(word, UNKNOWN) for word in part]) for part in (train, held_out)
    )
    return Words(*numbers, count=len(number) + 1)


@functools.cache
def chances(count: int) -> Tensor:
    """(count,): of each rank to be drawn, by Zipf's law: log((rank + 2) / (rank + 1)), over all."""
    ranks = torch.arange(count, dtype=torch.float64)
    return (((ranks + 2) / (ranks + 1)).log() / torch.tensor(count + 1.0).log()).float()


def draw(count: int, of: int, generator: Generator) -> Tensor:
    """(count,) ranks below `of`, int64; frequent ones come up more than once."""
    return torch.multinomial(chances(of), count, replacement=True, generator=generator)


# -- characters ------------------------------------------------------------------------------------
# A GPT on the characters of Python's documentation: the demo's, narrow.
#
# A step of GPT-2's averages the loss over 2^19 tokens, one here over 2^9. So the gradient of each
# activation is 1024 times as large here. `GPT_AS_AVERAGED` has gradients as small as GPT-2's: its
# loss is divided by 1024, as for one of 1024 micro-batches, and so is all that the optimizer
# compares gradients with. In exact arithmetic it is the same training.

SIZE = GPTConfig(vocab=128, context=64, width=64, layers=2, heads=2)
GPT_BATCH, GPT_STEPS = 8, 600
GPT_MICRO_BATCHES = 1024


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    """What is trained on, what is held out: ASCII, with ? for anything else."""
    train, held_out = (part.where(part < SIZE.vocab, ord("?")) for part in _cut())
    return train, held_out


class _GPTTraining(OneModel):
    def __init__(self, trainer: Trainer, seed: int, micro_batches: int = 1) -> None:
        share = 1 / micro_batches
        adamw = functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1, eps=1e-8 * share)
        super().__init__(
            trainer, seed, GPT(SIZE), adamw, max_grad_norm=share, share=share,
            schedule=one_cycle(3e-3, GPT_STEPS),
        )  # fmt: skip

    def _draw(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        batches = text_batches(_text()[0], batch=GPT_BATCH, context=SIZE.context, seed=seed)
        for batch in batches:
            yield tuple(part.to(self._device) for part in batch)

    def _loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._net(idx, targets)
        return loss

    @torch.no_grad()
    def judge(self) -> Metrics:
        text, batch = _text()[1].to(self._device), (GPT_BATCH, SIZE.context)
        count = min(64, (len(text) - 1) // math.prod(batch))
        parts = (text[i:][: count * math.prod(batch)].view(count, *batch) for i in (0, 1))
        losses = [self._net.forward(idx, y).item() for idx, y in zip(*parts, strict=True)]
        loss = statistics.fmean(losses)
        return {"held-out loss": loss, "perplexity": math.exp(loss)}


GPT_TASK = Task(
    name="GPT",
    claim="language model",
    data="Python's documentation, as characters; the last tenth is held out",
    metric="perplexity",
    higher=False,
    steps=GPT_STEPS,
    start=_GPTTraining,
)

GPT_AS_AVERAGED = dataclasses.replace(
    GPT_TASK,
    name="GPT, 2^19 tokens",
    start=functools.partial(_GPTTraining, micro_batches=GPT_MICRO_BATCHES),
)
