"""Models at O2 with an MPOptimizer, and a step of theirs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mpcompile import LossScale, MPOptimizer, mpcompile

HALVES = [torch.float16, torch.bfloat16]


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc1, self.norm = nn.Linear(8, width), nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.norm(self.fc1(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(tokens)))


def trained(
    model: nn.Module, dtype: torch.dtype = torch.float16, lr: float = 0.05, **options: Any
) -> tuple[nn.Module, MPOptimizer]:
    scale = LossScale.dynamic(init_scale=2.0**10) if dtype is torch.float16 else "dynamic"
    model = mpcompile(model, level="O2", dtype=dtype, emit="eager", loss_scale=scale)
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, MPOptimizer(sgd, emit="eager", **options)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
