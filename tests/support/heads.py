"""A linear layer and the cross entropy that alone reads it, as a program, and its inputs."""

import torch
import torch.nn.functional as F
from compare import leaf
from torch import Tensor

FUSED = "mpcompile::linear_cross_entropy"


def head(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), target.flatten())


def head_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return leaf(2, 3, 4), leaf(7, 4), torch.randint(0, 7, (2, 3))
