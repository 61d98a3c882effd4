"""A small GPT to train: pre-norm transformer, rotary positions, tied head, loss in the forward.

Shapes below: B sequences, T tokens each, D = `GPTConfig.width`, H heads of size E = D / H,
V = `GPTConfig.vocab`. The layers are GPT-2's (Radford et al., 2019, section 2.3) without biases;
positions are rotary (Su et al., 2021, section 3.2), with which it learns faster than with a table.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`. The defaults are small enough to train on two CPU cores."""

    vocab: int = 256
    context: int = 128
    width: int = 256
    layers: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} does not divide into {self.heads} heads of an even size"
            )


class _Rotary(nn.Module):
    """Turn channel pairs of queries or keys by their position, (B, H, T, E) -> (B, H, T, E).

    The angles are FP32 buffers, not part of the state dict: they follow from the sizes.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, size: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequency = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angle = torch.arange(context, dtype=torch.float32)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class _Attention(nn.Module):
    """Causal self-attention, (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.rotary = _Rotary(config.context, config.width // config.heads)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class _Block(nn.Module):
    """One pre-norm layer, (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = _Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return result


class GPT(nn.Module):
    """The language model. ``model(idx, targets)`` is the mean cross-entropy in nats per token.

    >>> model = GPT(GPTConfig(layers=1, width=32, heads=2))
    >>> idx = torch.zeros(2, 8, dtype=torch.int64)
    >>> model(idx, idx).shape, model.logits(idx).shape
    (torch.Size([]), torch.Size([2, 8, 256]))
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        # Two additions to the residual stream per layer: keep its variance independent of depth.
        std = 0.03
        into_residual = std / (2 * config.layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scaled = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(weight, std=into_residual if scaled else std)

    def logits(self, idx: Tensor) -> Tensor:
        """Return next-token logits (B, T, V) of token numbers ``idx`` (B, T)."""
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar, of predicting ``targets`` (B, T) from ``idx`` (B, T)."""
        return F.cross_entropy(self.logits(idx).flatten(0, 1), targets.flatten())
