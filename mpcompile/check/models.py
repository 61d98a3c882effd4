"""The models that `mpcompile check` trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Broken",
    "Checkpointed",
    "Layers",
    "Mapped",
    "Overflowing",
    "Recurrent",
    "convolutions",
    "layers",
]


def convolutions() -> nn.Module:
    """(N, 3, 6, 6) -> (N, 4)."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
    )


def layers() -> nn.Module:
    """(N, 6) -> (N, 4)."""
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


class Layers(nn.Module):
    """(N, 6) -> (N, 4), with `call` as the way to call the first half."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU())
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.call(self.first, x))
        return y

    def call(self, part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """`part(x)`."""
        return part(x)


class Broken(Layers):
    """A function that Dynamo may not see stands between two graphs."""

    def call(self, part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _unseen(part(x))
        return y


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _unseen(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Checkpointed(Layers):
    """What the first half makes is computed again in the backward."""

    def call(self, part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(part, x, use_reentrant=False)
        return y


class Mapped(Layers):
    """What the first half makes is mapped over, row by row."""

    def call(self, part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.func.vmap(lambda row: row * row.sum().tanh())(part(x))
        return y


class Overflowing(Layers):
    """The square of what the first half makes does not fit FP16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.first(x) * 1e3
        return torch.tanh(self.last(high * high) * 1e-6)


class Recurrent(nn.Module):
    """(N, T, 6) -> (N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.lstm(x)[0][:, -1])
        return y
