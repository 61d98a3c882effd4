"""A small model in FP16, a loss that overflows, and whether a step changed anything."""

from typing import Any

import torch
from torch import nn

FP16: dict[str, Any] = {"dtype": torch.float16, "emit": "eager", "strict": True}
OVERFLOW = 1e30  # times a loss: beyond FP16 at any scale


def mlp(width: int = 8, out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, out))


def parameters(*models: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def assert_unchanged(before: list[torch.Tensor], *models: nn.Module) -> None:
    for old, new in zip(before, parameters(*models), strict=True):
        assert torch.equal(old, new)
