"""Sentences as numbers: padded rows of tokens, a part of them held out, and batches."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .grammar import draw_clause, source_of, target_of

__all__ = ["BEGIN", "END", "PAD", "Corpus", "corpus", "words_of"]

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
