"""GPT-2, BERT and a vision transformer. None has dropout: every arm would draw its masks."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention, (B, T, D) -> (B, T, D); queries, keys and values from one product."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class _Layer(nn.Module):
    """One transformer layer, (B, T, D) -> (B, T, D).

    Args:
        before: norms stand before the branches (GPT-2, ViT), else after the sums (BERT).
    """

    def __init__(
        self, width: int, heads: int, *, before: bool, causal: bool = False, tanh: bool = False,
        eps: float = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__()
        self.before = before
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="tanh" if tanh else "none")
        self.down = nn.Linear(4 * width, width)

    def _feed_forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.gelu(self.up(x)))
        return result

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attention(self.norm1(x))
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        result: Tensor = self.norm2(x + self._feed_forward(x))
        return result


class GPT2(nn.Module):
    """GPT-2 (Radford et al., 2019), 124M by default; tied head, mean cross-entropy (B, T)."""

    def __init__(
        self, *, vocab: int = 50257, context: int = 1024, width: int = 768, layers: int = 12,
        heads: int = 12,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            _Layer(width, heads, before=True, causal=True, tanh=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = _TiedHead()
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        steps = torch.arange(idx.shape[1], device=idx.device)
        x = self.tokens(idx) + self.positions(steps)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(self.norm(x), self.tokens.weight, targets)
        return loss


class _TiedHead(nn.Module):
    """A module, since Dynamo leaves a forward whose loop over layers breaks (FSDP2's hooks do) to
    Python, and compiles what is called there.
    """

    def forward(self, x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, table).flatten(0, 1), targets.flatten())


class BERTEncoder(nn.Module):
    """BERT's embeddings and layers (Devlin et al., 2019), large by default.

    A tag for every token stands in for the two heads of pre-training.
    """

    def __init__(
        self, *, vocab: int = 30522, context: int = 512, width: int = 1024, layers: int = 24,
        heads: int = 16, tags: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(
            _Layer(width, heads, before=False, eps=1e-12) for _ in range(layers)
        )
        self.head = nn.Linear(width, tags)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        steps = torch.arange(idx.shape[1], device=idx.device)
        segments = self.segments(torch.zeros_like(idx))
        x = self.norm(self.tokens(idx) + self.positions(steps) + segments)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class ViT(nn.Module):
    """Vision transformer (Dosovitskiy et al., 2021), B/16 by default: (B, 3, H, W) images."""

    def __init__(
        self, *, size: int = 224, patch: int = 16, width: int = 768, layers: int = 12,
        heads: int = 12, classes: int = 1000,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(
            _Layer(width, heads, before=True, eps=1e-6) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), targets)


# -- small -----------------------------------------------------------------------------------------
# Networks of small matrix products.


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
