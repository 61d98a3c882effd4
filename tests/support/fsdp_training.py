"""A small model, and how FSDP2 shards it: engines of a `ddp_training.Training`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH = 12  # 12 and 9 are not divisible by four ranks: some shards are padded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Its forward calls the blocks in a loop, which ends Dynamo's frame."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), Block(), nn.GELU(), nn.Linear(WIDTH, 4))


def shard_blocks(model: nn.Module, **options: Any) -> nn.Module:
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def shard_root(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, **options)
