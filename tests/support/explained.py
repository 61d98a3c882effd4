"""Models whose plans are compared: one for each kind of graph that is treated specially."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Tagger(nn.Module):
    """A graph that is cut at its recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 5)
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.rnn(self.embed(x))[0]
        return self.head(hidden)


class Pictures(nn.Module):
    """A convolution and a batch norm, which writes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Broken(nn.Module):
    """Two graphs, the second of which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).exp()
        torch._dynamo.graph_break()
        return self.second(F.dropout(y)) + y


class Checkpointed(nn.Module):
    """A part that the backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


class Squared(nn.Module):
    """A user's own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Square.apply(self.first(x)))  # type: ignore[no-untyped-call]


class Attention(nn.Module):
    """Attention, norms, and a head of an odd size, whose product is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 33)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


MODELS: dict[type[nn.Module], Callable[[], Tensor]] = {
    Tagger: lambda: torch.randint(0, 11, (2, 5)),
    Pictures: lambda: torch.rand(2, 3, 6, 6),
    Broken: lambda: torch.rand(4, 8),
    Checkpointed: lambda: torch.rand(4, 8),
    Squared: lambda: torch.rand(4, 8),
    Attention: lambda: torch.rand(2, 4, 16),
}
