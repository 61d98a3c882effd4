"""What the models are called with."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a model is called with.

    Attributes:
        shape: of the input.
        targets: of the targets.
        classes: targets are 0 .. classes - 1.
        vocab: the input is numbers 0 .. vocab - 1; 0: it is FP32, normally distributed.
    """

    shape: tuple[int, ...]
    targets: tuple[int, ...]
    classes: int
    vocab: int = 0

    def empty(self, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Input and targets whose values do not matter, and whose memory is never touched."""
        kind = torch.int64 if self.vocab else dtype
        x = torch.empty(self.shape, device=device, dtype=kind)
        return [x, torch.empty(self.targets, device=device, dtype=torch.int64)]

    def draw(self, device: torch.device) -> list[Tensor]:
        """Input and targets at random, from torch's current seed."""
        x = torch.randint(self.vocab, self.shape) if self.vocab else torch.randn(self.shape)
        return [x.to(device), torch.randint(self.classes, self.targets).to(device)]


def tokens(batch: int, length: int, vocab: int, classes: int) -> Sample:
    """Tokens, and a class for each."""
    return Sample((batch, length), (batch, length), classes, vocab)


def pixels(batch: int, size: int = 224, classes: int = 1000) -> Sample:
    """Images in three colours, and a class for each."""
    return Sample((batch, 3, size, size), (batch,), classes)
