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
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.ways import Trainer
from benchmarks.papers.task import Metrics, OneModel, Task, Training
from benchmarks.papers.tasks.grammar import draw_clause, source_of, target_of

# -- corpus ----------------------------------------------------------------------------------------
# Sentences as numbers: padded rows of tokens, a part of them held out, and batches.

PAD, BEGIN, END = 0, 1, 2
SOURCE, TARGET = 14, 18
"""The longest sentences that are kept, in tokens."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """N pairs of sentences, no source of which occurs twice.

    Attributes:
        sources: (N, 15), int64: tokens, END, PAD.
        targets: (N, 20), int64: BEGIN, tokens, END, PAD.
        source_words, target_words: the vocabularies; a word's place is its token.
    """

    sources: Tensor
    targets: Tensor
    source_words: tuple[str, ...]
    target_words: tuple[str, ...]

    def __getitem__(self, chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.sources[chosen], self.targets[chosen]


@functools.cache
def corpus(count: int = 16_000) -> Corpus:
    draws = random.Random(2017)
    pairs: dict[tuple[str, ...], list[str]] = {}
    while len(pairs) < count:
        clause = draw_clause(draws)
        source, target = source_of(clause), target_of(clause)
        if len(source) <= SOURCE and len(target) <= TARGET:
            pairs[tuple(source)] = target
    source_words, target_words = _vocabulary(pairs), _vocabulary(pairs.values())
    sources = [[*source, "<end>"] for source in pairs]
    targets = [["<begin>", *target, "<end>"] for target in pairs.values()]
    return Corpus(
        _padded(sources, source_words, SOURCE + 1),
        _padded(targets, target_words, TARGET + 2),
        source_words,
        target_words,
    )


def _vocabulary(sentences: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return ("<pad>", "<begin>", "<end>", *sorted({w for sentence in sentences for w in sentence}))


def _padded(sentences: Sequence[Sequence[str]], words: Sequence[str], length: int) -> Tensor:
    tokens = {word: token for token, word in enumerate(words)}
    rows = [[*map(tokens.__getitem__, s), *[PAD] * (length - len(s))] for s in sentences]
    return torch.tensor(rows)


def words_of(row: Tensor, words: Sequence[str]) -> str:
    """The words of a row of tokens, up to its end; suffixes are words of their own."""
    tokens = row.tolist()
    if END in tokens:
        tokens = tokens[: tokens.index(END)]
    return " ".join(words[token] for token in tokens if token not in (PAD, BEGIN))


# -- lstm ------------------------------------------------------------------------------------------
# An LSTM that reads, an LSTM that writes, and attention between them.
#
# The encoder reads both ways, and the decoder starts from where its backward half ends, as in
# "Neural Machine Translation by Jointly Learning to Align and Translate" (Bahdanau et al., 2014).
# Attention is global, scored by a matrix, and comes behind the decoder's LSTM, as in "Effective
# Approaches to Attention-based Neural Machine Translation" (Luong et al., 2015), without feeding
# its result back: so a whole sentence goes through the decoder in one call.


class LSTMTranslator(nn.Module):
    """Sources (B, S), what was written so far (B, T) -> logits of what follows (B, T, words)."""

    def __init__(self, source_words: int, target_words: int, width: int = 80) -> None:
        super().__init__()
        embedded, half = width // 2, width // 2
        self.sources = nn.Embedding(source_words, embedded, padding_idx=PAD)
        self.targets = nn.Embedding(target_words, embedded, padding_idx=PAD)
        self.reader = nn.LSTM(embedded, half, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(half, width)
        self.writer = nn.LSTM(embedded, width, batch_first=True)
        self.score = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, target_words)

    def forward(self, sources: Tensor, written: Tensor) -> Tensor:
        return self.decode(*self.encode(sources), written)

    def encode(self, sources: Tensor) -> tuple[Tensor, Tensor]:
        """What was read (B, S, width), and where there is padding (B, 1, S)."""
        read: Tensor = self.reader(self.sources(sources))[0]
        return read, (sources == PAD).unsqueeze(1)

    def decode(self, read: Tensor, padding: Tensor, written: Tensor) -> Tensor:
        backward_end = read[:, 0, read.shape[2] // 2 :]
        start = torch.tanh(self.bridge(backward_end)).unsqueeze(0)
        states, _ = self.writer(self.targets(written), (start, torch.zeros_like(start)))
        scores = self.score(states) @ read.transpose(1, 2)
        weights = scores.masked_fill(padding, float("-inf")).softmax(2)
        logits: Tensor = self.head(torch.tanh(self.join(torch.cat([weights @ read, states], 2))))
        return logits


# -- transformer -----------------------------------------------------------------------------------
# A small transformer, encoder and decoder: "Attention Is All You Need" (Vaswani et al., 2017).
#
# Layer norm behind each residual sum, sinusoidal positions, the decoder's embedding for its last
# layer too. No dropout: no sentence is seen twice.


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width): sines at even places, cosines at odd ones, of wavelengths 2 pi to 10000."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


class _Attention(nn.Module):
    """From x (B, T, width) to memory (B, S, width), where `allowed` (.., T or 1, S) is true."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, allowed: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(memory), self.value(memory))
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class _Layer(nn.Module):
    """Self-attention, attention to a memory in a decoder, and two linear layers."""

    def __init__(self, width: int, heads: int, hidden: int, decodes: bool) -> None:
        super().__init__()
        self.itself = _Attention(width, heads)
        self.across = _Attention(width, heads) if decodes else None
        self.linear = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 + decodes))

    def forward(
        self, x: Tensor, seen: Tensor, memory: Tensor | None = None, readable: Tensor | None = None
    ) -> Tensor:
        x = self.norms[0](x + self.itself(x, x, seen))
        if self.across is not None:
            x = self.norms[1](x + self.across(x, memory, readable))
        last: Tensor = self.norms[-1](x + self.linear(x))
        return last


class Transformer(nn.Module):
    """Sources (B, S), what was written so far (B, T) -> logits of what follows (B, T, words)."""

    def __init__(
        self,
        source_words: int,
        target_words: int,
        width: int = 48,
        heads: int = 4,
        hidden: int = 96,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.sources = nn.Embedding(source_words, width)
        self.targets = nn.Embedding(target_words, width)
        self.encoder, self.decoder = (
            nn.ModuleList(_Layer(width, heads, hidden, decodes) for _ in range(layers))
            for decodes in (False, True)
        )
        self.head = nn.Linear(width, target_words, bias=False)
        self.head.weight = self.targets.weight
        self.register_buffer("positions", sinusoids(64, width), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for embedding in (self.sources, self.targets):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, sources: Tensor, written: Tensor) -> Tensor:
        return self.decode(*self.encode(sources), written)

    def encode(self, sources: Tensor) -> tuple[Tensor, Tensor]:
        """What was read (B, S, width), and where it is no padding (B, 1, 1, S)."""
        readable = (sources != PAD)[:, None, None]
        x = self._embedded(self.sources, sources)
        for layer in self.encoder:
            x = layer(x, readable)
        return x, readable

    def decode(self, read: Tensor, readable: Tensor, written: Tensor) -> Tensor:
        length = written.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=written.device).tril()
        x = self._embedded(self.targets, written)
        for layer in self.decoder:
            x = layer(x, seen, read, readable)
        logits: Tensor = self.head(x)
        return logits

    def _embedded(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        embedded: Tensor = embedding(tokens) * math.sqrt(self.positions.shape[1])  # type: ignore[union-attr, index]
        return embedded + self.positions[: tokens.shape[1]]  # type: ignore[index]


# -- train -----------------------------------------------------------------------------------------

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


class _Training(OneModel):
    def __init__(self, recipe: _Recipe, trainer: Trainer, seed: int) -> None:
        self._recipe = recipe
        data, share = corpus(), 1 / recipe.micro_batches
        super().__init__(
            trainer, seed, recipe.net(len(data.source_words), len(data.target_words)),
            recipe.optimizer, max_grad_norm=share, share=share,
            schedule=lambda made: torch.optim.lr_scheduler.LambdaLR(made, recipe.schedule),
        )  # fmt: skip

    def _draw(self, seed: int) -> Iterator[list[Tensor]]:
        data = corpus()
        return self._shuffled(seed, data, len(data.sources), HELD_OUT, self._recipe.batch)

    def _loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        logits = self._net(sources, targets[:, :-1])
        return _entropy(logits, targets, self._recipe.label_smoothing)

    @torch.no_grad()
    def judge(self) -> Metrics:
        data = corpus()
        sources, targets = (part.to(self._device) for part in data[:HELD_OUT])
        logits = self._net.forward(sources, targets[:, :-1])
        following = targets[:, 1:]
        right = (logits.argmax(2) == following)[following != PAD].float().mean().item()
        found = greedy(self._net, sources, following.shape[1])
        sentences = (
            [words_of(row, data.target_words) for row in rows] for rows in (found, following)
        )
        return {
            "held-out loss": _entropy(logits, targets).item(),
            "right words, %": 100 * right,
            "BLEU": bleu(*sentences),
        }


def _entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
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
