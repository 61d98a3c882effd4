"""Networks and generated data for the scripts in this folder: small, so that they run anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block over (B, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT that returns its logits and its loss."""

    def __init__(self, vocab: int = 32, context: int = 16, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text(count: int, context: int, device: str) -> tuple[Tensor, Tensor]:
    """Sequences that count up from random numbers: (count, context), and the next tokens."""
    first = torch.randint(32, (count, 1))
    tokens = (first + torch.arange(context + 1)) % 32
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def classifier(classes: int = 4) -> nn.Module:
    """A small convolutional network over (B, 3, 8, 8)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


def pictures(count: int, device: str) -> tuple[Tensor, Tensor]:
    """Noise with one bright quarter, (count, 3, 8, 8), and which of the four it is."""
    labels = torch.randint(4, (count,))
    noise = torch.rand(count, 3, 8, 8)
    rows, columns = torch.arange(8) // 4, torch.arange(8) // 4
    quarters = 2 * rows[:, None] + columns
    noise += (quarters == labels[:, None, None]).float()[:, None]
    return noise.to(device), labels.to(device)


def generator(noise: int) -> nn.Module:
    """(B, noise, 1, 1) -> (B, 1, 8, 8)."""
    return nn.Sequential(
        nn.ConvTranspose2d(noise, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator() -> nn.Module:
    """(B, 1, 8, 8) -> (B,), logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4, bias=False), nn.Flatten(0),
    )  # fmt: skip
