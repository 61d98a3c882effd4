"""Padding is exact through chains of products: what stands between two of them, and who else reads
the padded values.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st
from padding_checks import FEW, SIZES, all_aligned, drawn
from torch import Tensor, nn

REST = pytest.mark.sweep("the rest of a matrix")

ACTIVATIONS = [
    F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, torch.exp, torch.log,
    torch.rsqrt, torch.reciprocal, torch.sqrt, lambda x: x.square() + 1, lambda x: x**3,
    lambda x: 1 / (1 + x * x), lambda x: x.clamp(0.25, 1), lambda x: x * 0.5 - 3,
    lambda x: x.abs().log1p(), torch.cos, lambda x: F.softmax(x, -1),
    lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x - x.mean(-1, True),
    lambda x: x / x.norm(dim=-1, keepdim=True), lambda x: x * x.sum(0),
    lambda x: torch.maximum(x, -x), lambda x: x.masked_fill(x > 0, 2.0),
    lambda x: torch.where(x > 0, x, 1.0), lambda x: x.flip(-1), lambda x: torch.cat([x, x], 0),
    lambda x: x.cumsum(-1), lambda x: F.dropout(x, 0.0), lambda x: x.detach(),
    lambda x: x.detach() * x,
]  # fmt: skip


# By default one level of each, in turns.
BY_LEVEL = [
    pytest.param(a, level, id=f"{level}-{number}", marks=() if first else REST)
    for number, a in enumerate(ACTIVATIONS)
    for level in ("O1", "O2")
    for first in [(level == "O2") == bool(number % 2)]
]


@pytest.mark.slow_rows("compiles padded models, of many sizes", but=8)
@pytest.mark.parametrize(("activation", "level"), BY_LEVEL)
@drawn(1, 25, b=st.integers(1, 3), i=SIZES, h=SIZES, o=SIZES)
def test_linear_pointwise_linear(
    activation: Any, level: str, b: int, i: int, h: int, o: int
) -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(i, h), nn.Linear(h, o)
    with torch.no_grad():
        up.bias.abs_().add_(3)  # inside the domain of a logarithm

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = up, down

        def forward(self, x: Tensor) -> Tensor:
            return self.down(activation(self.up(x)))

    all_aligned(Chain(), 0.1 * torch.randn(b, 8, i), level=level)


@drawn(2, channels=FEW, hidden=FEW, out=FEW, last=st.booleans())
def test_conv_bias_relu_conv(channels: int, hidden: int, out: int, last: bool) -> None:
    assume(hidden > 1 or not last)  # one channel is in both layouts, its padding in one of them
    net = nn.Sequential(nn.Conv2d(channels, hidden, 3), nn.ReLU(), nn.Conv2d(hidden, out, 3))
    x = torch.randn(2, channels, 7, 7)
    all_aligned(net, x.contiguous(memory_format=torch.channels_last) if last else x)


class Attention(nn.Module):
    """Heads of 20, as ESM's are."""

    def __init__(self, heads: int, head: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(heads * head, 3 * heads * head), nn.Linear(heads * head, 13)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, width))


@pytest.mark.parametrize(("heads", "head"), [(3, 20), (2, 7), (1, 1)])
def test_attention_with_an_odd_head(heads: int, head: int) -> None:
    all_aligned(Attention(heads, head), torch.randn(2, 5, heads * head))


class Tied(nn.Module):
    """A 101-word vocabulary whose embedding is the head, too."""

    def __init__(self, words: int = 101, width: int = 20) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.block = nn.Linear(width, width)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.words(idx)
        x = x + F.gelu(self.block(x))
        logits = F.linear(x, self.words.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_tied_embedding_and_head(level: str) -> None:
    tokens = torch.randint(101, (2, 6))
    all_aligned(Tied(), tokens, tokens.roll(1), level=level)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_residual_adds_of_equally_padded_values(level: str) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.a, self.b = nn.Linear(9, 33), nn.Linear(33, 33), nn.Linear(33, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            x = x + F.relu(self.a(x))
            return self.b(x)

    all_aligned(Residual(), torch.randn(8, 9), level=level)


def test_every_output_along_a_padded_chain_has_its_own_size() -> None:
    up, down = nn.Linear(8, 13), nn.Linear(13, 7)

    def program(x: Tensor) -> Any:
        h = up(x)
        a = F.gelu(h)
        return h, a, a.t(), a.view(-1), a.view(4, 2, 13), a.unsqueeze(0), a.sum(), down(a)

    all_aligned(program, torch.randn(8, 8))


def test_views_behind_a_padded_product() -> None:
    up = nn.Linear(8, 21)

    def program(x: Tensor) -> Any:
        h = up(x)
        return (
            h.view(8, 3, 7), h.view(-1), h.unflatten(1, (7, 3)), h.view(2, 4, 21).flatten(1),
            h.unfold(1, 3, 2), h.t().contiguous().view(3, -1), h.as_strided((4, 2), (21, 1), 3),
            torch.einsum("bi,bi->b", h, h), h[:, 5], h.chunk(3, -1)[1], h.expand(2, 8, 21),
        )  # fmt: skip

    all_aligned(program, torch.randn(8, 8))


@pytest.mark.parametrize("method", ["contiguous", "clone"])
def test_a_layout_behind_a_padded_product(method: str) -> None:
    """What lanes hold is found out with single numbers, which have no such layout."""
    up, down = nn.Linear(8, 21), nn.Linear(21, 5)

    def program(x: Tensor) -> Any:
        return down(getattr(up(x), method)(memory_format=torch.channels_last))

    all_aligned(program, torch.randn(2, 3, 4, 8))
