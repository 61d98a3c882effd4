"""Models whose plans are compared: one for each kind of graph that is treated specially."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from module_of import function_of, module_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def tagger() -> Any:
    """A graph that is cut at its recurrent layer."""
    return module_of(
        lambda m, x: m.head(m.rnn(m.embed(x))[0]),
        embed=nn.Embedding(11, 8), head=nn.Linear(8, 5), rnn=nn.LSTM(8, 8, batch_first=True),
    )  # fmt: skip


def pictures() -> Any:
    """A convolution and a batch norm, which writes its buffers."""
    return module_of(
        lambda m, x: m.head(F.relu(m.norm(m.conv(x))).mean((2, 3))),
        conv=nn.Conv2d(3, 8, 3, padding=1), norm=nn.BatchNorm2d(8), head=nn.Linear(8, 5),
    )  # fmt: skip


class Broken(nn.Module):
    """Two graphs, the second of which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).exp()
        torch._dynamo.graph_break()
        return self.second(F.dropout(y)) + y


def checkpointed() -> Any:
    """A part that the backward computes again."""
    return module_of(
        lambda m, x: m.head(checkpoint(m.inner, x, use_reentrant=False)),
        inner=nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), head=nn.Linear(8, 8),
    )  # fmt: skip


def square(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x * x


Square = function_of(square, lambda ctx, gradient: 2 * ctx.saved_tensors[0] * gradient)


def squared() -> Any:
    """A user's own backward."""
    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    return module_of(lambda m, x: m.second(Square.apply(m.first(x))), **layers)


def attention() -> Any:
    """Attention, norms, and a head of an odd size, whose product is padded."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return module_of(lambda m, x: m.head(m.layer(x)), layer=layer, head=nn.Linear(16, 33))


MODELS: dict[Callable[[], nn.Module], Callable[[], Tensor]] = {
    tagger: lambda: torch.randint(0, 11, (2, 5)),
    pictures: lambda: torch.rand(2, 3, 6, 6),
    Broken: lambda: torch.rand(4, 8),
    checkpointed: lambda: torch.rand(4, 8),
    squared: lambda: torch.rand(4, 8),
    attention: lambda: torch.rand(2, 4, 16),
}
