"""Pieces of real models: layers and idioms that bring several hazards at once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import SETTINGS, check, leaf
from module_of import module_of
from torch import nn
from torch.nn.utils import parametrizations


class Attention(nn.Module):
    """nn.MultiheadAttention, which returns its averaged weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)


class Cells(nn.Module):
    """A recurrence written out with cells."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gru = nn.LSTMCell(16, 16), nn.GRUCell(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        h = c = g = x.new_zeros(2, 16)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            g = self.gru(h, g)
        return g, c


class Experts(nn.Module):
    """A mixture of experts: top-k routing, masks, weighted sums."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            share = (weights * (chosen == i)).sum(-1, keepdim=True)
            out += share * expert(x)
        return out


class Rotary(nn.Module):
    """Rotary positions as Hugging Face writes them, attention scores with a mask in place."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("inverse", 10000.0 ** -(torch.arange(0, 16, 2) / 16))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            steps = torch.arange(x.shape[1], device=x.device)[:, None].float()
            angle = torch.cat([steps * self.inverse] * 2, -1)
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.rotate(self.query(x)) @ self.rotate(self.key(x)).mT / 4
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype) @ x


class Hooked(nn.Module):
    """Module hooks: before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.first.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).tanh()  # type: ignore[no-any-return]


class Cache(nn.Module):
    """A key cache written at a position that is data."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(10, 2, 16))
        self.register_buffer("position", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = self.key(x.transpose(0, 1))
        with torch.no_grad():
            self.cache.index_copy_(0, torch.arange(4) + self.position, key)
            self.position += 4
        return torch.einsum("tbc,sbc->bts", key, self.cache)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)


MODELS = {
    "attention": Attention,
    "encoder": encoder,
    "cells": Cells,
    "experts": Experts,
    "rotary": Rotary,
    "hooked": Hooked,
    "cache": Cache,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(16, 8)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(16, 8)),
}


@SETTINGS
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, level: str, emit: str) -> None:
    check(MODELS[name](), leaf(2, 4, 16), level=level, emit=emit)


@pytest.mark.filterwarnings("ignore:mpcompile. 50% of the product FLOPs of Hooked ran in compiled")
@SETTINGS
def test_a_hook_on_the_gradient(level: str, emit: str) -> None:
    """Dynamo doesn't trace a module with such a hook; its gradient must be true to size."""
    model = Hooked()
    model.second.register_full_backward_hook(lambda module, by, of: (by[0].clamp(-0.01, 0.01),))
    check(model, leaf(2, 4, 16), level=level, emit=emit, strict=False)


@SETTINGS
def test_convolutions_up_and_down(level: str, emit: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(8, 4, 3, bias=False), nn.InstanceNorm2d(4, affine=True), nn.AvgPool2d(2),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last).requires_grad_()
    options = {"low": ["conv2d", "conv_transpose2d"], "level": level, "emit": emit}
    check(model, x, **options)


@SETTINGS
def test_sparse_gradient(level: str, emit: str) -> None:
    """It stays sparse, and is checked for overflow and unscaled in that form."""

    def forward(m: Any, tokens: torch.Tensor) -> Any:
        return m.head(m.table(tokens))

    model = module_of(forward, table=nn.Embedding(20, 16, sparse=True), head=nn.Linear(16, 4))
    check(model, torch.randint(20, (5,)), level=level, emit=emit, low=["linear"])
    assert model.table.weight.grad.is_sparse
