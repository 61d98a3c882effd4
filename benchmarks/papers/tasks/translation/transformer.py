"""A small transformer, encoder and decoder: "Attention Is All You Need" (Vaswani et al., 2017).

Layer norm behind each residual sum, sinusoidal positions, the decoder's embedding for its last
layer too. No dropout: no sentence is seen twice.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .corpus import PAD

__all__ = ["Transformer", "sinusoids"]


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
