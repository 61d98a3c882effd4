"""The words of Python's documentation, the frequent ones first, and how others are drawn."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re

import torch
from torch import Generator, Tensor

from mpcompile.demo import corpus

__all__ = ["UNKNOWN", "Words", "chances", "draw", "words"]

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


@functools.cache
def words() -> Words:
    """Words in lower case, numbers and signs; the last tenth of the text is held out."""
    text = corpus()
    train, held_out = (
        re.findall(r"[a-z_]+|[0-9]+|[^\sa-z_0-9]", bytes(part.tolist()).decode().lower())
        for part in (text.train, text.held_out)
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
