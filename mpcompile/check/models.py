"""The models that `mpcompile check` trains.

Their dims are 64 and more: whole vectors, and whole tiles of 32x32, as the kernels of real models
have. Operators with kernels of their own (products, convolutions) are there to stand between
those that the compiler makes kernels of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from ..demo import GPT, GPTConfig

__all__ = ["MODELS", "Model"]

BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Model:
    """One model, and how it is trained.

    Attributes:
        about: what it is, as a phrase.
        make: the model; it returns a loss, or what should become small.
        batch: its inputs.
        optimizer: takes its parameters.
        dtype: the low dtype; None: only the optimizer's step is compiled.
        level: as in `mpcompile()`.
        whole: forward, backward and step are one compiled function.
    """

    about: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    optimizer: Callable[..., Optimizer]
    dtype: torch.dtype | None
    level: str = "O1"
    whole: bool = False


class _Residual(nn.Module):
    """A stem and a block of a ResNet, (N, 3, 64, 64) -> (N, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(3, 64, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.block = nn.Sequential(
            _convolution(64, 64, 3, 2), nn.ReLU(), _convolution(64, 64, 3, 1)
        )
        self.skip = _convolution(64, 64, 1, 2)
        self.last = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y: Tensor = self.last(F.relu(self.block(x) + self.skip(x)).mean((2, 3)))
        return y


def _convolution(given: int, made: int, kernel: int, stride: int) -> nn.Module:
    layer = nn.Conv2d(given, made, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(made))


class _Recurrent(nn.Module):
    """(N, T, 128) -> (N, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(128, 128, batch_first=True), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.lstm(x)[0][:, -1]))
        return y


class _Bag(nn.Module):
    """(N, T) places in a table -> (N, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(512, 128, mode="mean")
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(128, 64), nn.Softplus())

    def forward(self, places: Tensor) -> Tensor:
        y: Tensor = self.last(self.table(places))
        return y


class _Attention(nn.Module):
    """Attention without a mask, with one of bools, and written out; (N, T, 128) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(128, 384) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for number, layer in enumerate(self.qkv):
            q, k, v = layer(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4).unbind(0)
            if number < 2:
                mixed = F.scaled_dot_product_attention(q, k, v, mask if number else None)
            else:
                scores = (q @ k.mT / 8).masked_fill(~mask, float("-inf"))
                mixed = self.drop(scores.softmax(-1)) @ v
            x = x + mixed.transpose(1, 2).flatten(2)
        return x


class _Norms(nn.Module):
    """A norm of each kind, (N, 64, 128) -> (N, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([
            nn.LayerNorm(128), nn.GroupNorm(4, 64), nn.RMSNorm(128), nn.BatchNorm1d(64),
            nn.InstanceNorm1d(64, affine=True),
        ])  # fmt: skip
        self.products = nn.ModuleList(nn.Linear(128, 128) for _ in self.norms)

    def forward(self, x: Tensor) -> Tensor:
        for norm, product in zip(self.norms, self.products, strict=True):
            x = x + F.silu(product(norm(x)))
        y: Tensor = F.log_softmax(x, -1).norm(dim=-1)
        return y


class _Pools(nn.Module):
    """Pools and maxima, (N, 3, 32, 32) -> (N, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(n, 64, 3, padding=1) for n in (3, 64, 64))
        self.pools = nn.ModuleList([nn.MaxPool2d(2), nn.AvgPool2d(3, 2, 1), nn.MaxPool2d(6, 1, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer, pool in zip(self.layers, self.pools, strict=True):
            x = pool(F.gelu(layer(x)))
        x = F.adaptive_avg_pool2d(F.interpolate(x, scale_factor=2.0, mode="bilinear"), 8)
        return x.amax(3).logsumexp(2) - x.flatten(2).amin(2)


class _Mixer(nn.Module):
    """Products over both dims by turns, so that tiles are transposed; (N, 64, 128) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(2))
        self.tokens, self.channels = nn.Linear(64, 64), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.tokens(self.norms[0](x).mT)).mT
        y: Tensor = x + F.gelu(self.channels(self.norms[1](x)))
        return y


def _gpt() -> nn.Module:
    return GPT(GPTConfig(vocab=256, context=64, width=256, layers=1, heads=2))


def _numbers(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def _places(below: int, *shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randint(below, shape) for shape in shapes)


def _of(kind: Callable[..., Optimizer], **settings: float) -> Callable[..., Optimizer]:
    return lambda parameters: kind(parameters, **settings)


_TOKENS, _ROWS = _places(256, (4, 64), (4, 64)), _numbers(4, 64, 128)
_ADAMW, _SGD = _of(optim.AdamW, lr=1e-3), _of(optim.SGD, lr=0.01, momentum=0.9)

_OTHERS = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop,
)  # fmt: skip

MODELS = (
    Model("a GPT in BF16", _gpt, _TOKENS, _ADAMW, BF16),
    Model("a block of a ResNet in BF16", _Residual, _numbers(4, 3, 64, 64), _SGD, BF16),
    Model("an LSTM in BF16", _Recurrent, _numbers(8, 32, 128), _ADAMW, BF16),
    Model("an embedding bag in FP16", _Bag, _places(512, (64, 32)), _ADAMW, FP16),
    Model("attention and masks in BF16", _Attention, _ROWS, _SGD, BF16),
    Model("norms in BF16", _Norms, _ROWS, _SGD, BF16),
    Model("pools at O2 in FP16", _Pools, _numbers(4, 3, 32, 32), _SGD, FP16, "O2"),
    Model("transposed tiles in BF16", _Mixer, _ROWS, _SGD, BF16),
    Model("tiles at O2 in FP16, a whole step", _Mixer, _ROWS, _ADAMW, FP16, "O2", whole=True),
    *(Model(f"{kind.__name__}'s step", _Mixer, _ROWS, _of(kind), None) for kind in _OTHERS),
)
