"""A small net with each class of precision."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Two layers, a norm, a softmax: each precision class once."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.fc2(self.norm(F.relu(self.fc1(x)))), -1)
