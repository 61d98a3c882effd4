"""Small modules that are planned for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

X = torch.ones(3, 4)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Calls(nn.Module):
    """A module whose forward is a function of its layer and its input."""

    def __init__(self, body: Callable[[nn.Linear, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self.layer, x)


def in_two_graphs(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    torch._dynamo.graph_break()
    return layer(layer(y))
