"""Small programs and made-up device profiles, in front of the pass that plans."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage
from module_of import module_of
from torch import nn

from mpcompile.passes.graph.plan import plan
from mpcompile.profile import Profile, Sample

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# -- profiles, made up -----------------------------------------------------------------------------

BANDWIDTH = 1e9  # bytes a second
LAUNCH = 1e-6  # seconds, in which memory moves a thousand bytes
COPIES = (
    Sample("copy", FP32, (8,), LAUNCH, LAUNCH),
    Sample("copy", FP32, (10**9,), 1.0, 2.0),
    Sample("copy", BF16, (10**9,), 1.0, 2.0),
)

SMALL, LARGE = (1, 16, 16, 16), (1, 256, 256, 256)


def profile_of(*samples: Sample) -> Profile:
    return Profile("a CPU", "cpu", "2.13.0", "", 2, (*COPIES, *samples))


def both(kind: str, dims: tuple[int, ...], low: float, full: float) -> tuple[Sample, ...]:
    """One size in both dtypes; forward and backward together take these seconds."""
    return (Sample(kind, BF16, dims, low / 3, low), Sample(kind, FP32, dims, full / 3, full))


# FP32 is faster for small products, the low dtype for large ones.
CROSSING = profile_of(
    *both("gemm", SMALL, low=40e-6, full=10e-6),
    *both("gemm", LARGE, low=500e-6, full=2000e-6),
    *both("rnn", (4, 8, 16, 16, 4), low=90e-6, full=400e-6),
    *both("conv", (2, 4, 4, 9, 36, 1), low=30e-6, full=12e-6),
)


def staged(program: Any, *inputs: Any, profile: Profile | None = None, **options: Any) -> Stage:
    """A program in front of `plan`."""
    with torch._dynamo.config.patch(allow_rnn=True):
        stage = Stage(plan, program, *inputs, **options)
    stage.config = replace(stage.config, profile=profile)
    return stage


# -- programs --------------------------------------------------------------------------------------


def mlp() -> Any:
    return module_of(
        lambda m, x: m.down(F.gelu(m.up(x)) * torch.sigmoid(m.up(x))).relu().sum(),
        up=nn.Linear(16, 32), down=nn.Linear(32, 16),
    )  # fmt: skip


def residual() -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + m.down(F.gelu(m.up(m.norm(x))))
        x = x + m.down(F.gelu(m.up(m.norm(x))))
        return m.norm(x).mean()

    layers = {"up": nn.Linear(16, 16), "down": nn.Linear(16, 16)}
    return module_of(forward, norm=nn.LayerNorm(16), **layers)


def attention() -> Any:
    """Written by hand, as two products around a softmax."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        scores = m.q(x) @ m.k(x).transpose(-1, -2) / 4
        return (scores.softmax(-1) @ m.v(x) + x).tanh()

    return module_of(forward, **{name: nn.Linear(16, 16) for name in "qkv"})


def lookup() -> Any:
    def forward(m: Any, idx: torch.Tensor) -> torch.Tensor:
        x = m.norm(m.words(idx) + m.places(idx % 4))
        return F.cross_entropy(m.head(F.dropout(x)), idx)

    tables = {"words": nn.Embedding(10, 16), "places": nn.Embedding(4, 16)}
    return module_of(forward, norm=nn.LayerNorm(16), head=nn.Linear(16, 10), **tables)


class BasicBlock(nn.Module):
    """Two convolutions with batch norm, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + x).mean((2, 3))


def recurrent() -> Any:
    return module_of(
        lambda m, idx: F.log_softmax(m.head(m.lstm(m.tokens(idx))[0]), -1).mean(),
        tokens=nn.Embedding(10, 16),
        lstm=nn.LSTM(16, 16, batch_first=True),
        head=nn.Linear(16, 10),
    )


def tokens(*size: int) -> torch.Tensor:
    return torch.randint(0, 10, size)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "MLP": (mlp, lambda: leaf(8, 16)),
    "residual": (residual, lambda: leaf(8, 16)),
    "attention by hand": (attention, lambda: leaf(2, 8, 16)),
    "embedding and norm": (lookup, lambda: tokens(8)),
    "convolutions": (BasicBlock, lambda: leaf(2, 4, 6, 6)),
    "LSTM": (recurrent, lambda: tokens(4, 8)),
}
