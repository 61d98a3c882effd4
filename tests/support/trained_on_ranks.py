"""A training on several ranks, saved with `torch.distributed.checkpoint` as users do."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile

BATCH = 8  # examples of a step, over all ranks
OVERFLOWS = 1  # the step in which every gradient overflows


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
        engine: "DDP" or "FSDP2".
        generated: whether the optimizer is an `MPOptimizer`.
    """

    engine: str
    level: str
    generated: bool

    def __str__(self) -> str:
        return f"{self.engine}-{self.level}" + ("-MPOptimizer" if self.generated else "")


WAYS = {
    str(way): way
    for way in (
        Way("DDP", "O1", generated=False),
        Way("DDP", "O2", generated=True),
        Way("FSDP2", "O1", generated=False),
        Way("FSDP2", "O2", generated=True),
    )
}


def network() -> nn.Module:
    """Some of its dims don't divide by the number of ranks."""
    return nn.Sequential(
        nn.Linear(16, 31), nn.LayerNorm(31), nn.GELU(), nn.Linear(31, 24), nn.GELU(),
        nn.Linear(24, 5),
    )  # fmt: skip


class Training:
    """What a training script makes before it loads anything, and its loop.

    Args:
        seed: of the weights.
    """

    def __init__(self, way: Way, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = network()
        # It grows at the third good step in a row, so its state is seen in what comes later.
        scale = LossScale.dynamic(init_scale=1024.0, growth_interval=3)
        options: dict[str, Any] = {"dtype": torch.float16, "emit": "eager", "loss_scale": scale}
        if way.engine == "DDP":
            mpcompile(self.net, level=way.level, strict=True, **options)
            self.model: nn.Module = DistributedDataParallel(self.net)
        else:
            for index in (0, 3):
                fully_shard(self.net.get_submodule(str(index)))
            self.model = fully_shard(self.net)
            mpcompile(self.net, level=way.level, strict=True, **options)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if way.generated:
            self.optimizer = MPOptimizer(self.optimizer, emit="eager")

    def before_backward(self) -> None:
        """For what happens in the middle of a step."""

    @property
    def scale(self) -> LossScale:
        return loss_scale_of(self.net)

    def train(self, start: int, end: int) -> None:
        """Steps `start` to `end` - 1 on this rank's part of each batch."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for step in range(start, end):
            torch.manual_seed(step)
            x, y = torch.randn(BATCH, 16), torch.randint(5, (BATCH,))
            mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x[mine]), y[mine])
            self.before_backward()
            (loss * (1e30 if step == OVERFLOWS else 1)).backward()
            self.optimizer.step()

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scale": self.scale}

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip

    def whole(self) -> dict[str, Any]:
        """A copy of all that training goes on from: whole tensors and plain values."""
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        state = {"model": model, "optimizer": optimizer, "scale": self.scale.state_dict()}
        return copy.deepcopy(state)


def leaves(state: Any) -> list[tuple[Any, Any]]:
    """Each tensor as a list of its numbers, so that `==` compares bit for bit."""
    found, _ = pytree.tree_flatten_with_path(state)
    return [(path, v.tolist() if isinstance(v, torch.Tensor) else v) for path, v in found]
