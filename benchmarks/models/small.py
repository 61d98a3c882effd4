"""Networks of small matrix products."""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLP", "Tagger"]


class MLP(nn.Module):
    """Linear layers and ReLU on (B, D) rows."""

    def __init__(self, *, inputs: int = 64, width: int = 64, layers: int = 4, classes: int = 10):
        super().__init__()
        sizes = [inputs, *[width] * layers]
        hidden = [
            module for i, o in itertools.pairwise(sizes) for module in (nn.Linear(i, o), nn.ReLU())
        ]
        self.hidden = nn.Sequential(*hidden)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(x)), targets)


class Tagger(nn.Module):
    """An LSTM over (B, T) tokens, then a linear layer that tags each of them."""

    def __init__(self, *, vocab: int = 256, width: int = 64, tags: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, tags)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x, _ = self.lstm(self.tokens(idx))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
