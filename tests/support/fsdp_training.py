"""Trainings of a small model that FSDP2 shards, beside one process with all ranks' batches."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_training import everyones as everyones
from ddp_training import sgd as sgd
from torch import nn
from torch.distributed.fsdp import fully_shard

from mpcompile import LossScale, loss_scale_of, mpcompile

Optimizing = Callable[[nn.Module], torch.optim.Optimizer]
WIDTH = 12  # 12 and 9 are not divisible by four ranks: some shards are padded
OVERFLOW = 1e30


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


def shard_blocks(model: nn.Module, **options: Any) -> None:
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        fully_shard(block, **options)
    fully_shard(model, **options)


def shard_root(model: nn.Module, **options: Any) -> None:
    fully_shard(model, **options)


@dataclass
class Training:
    """A sharded model and its whole FP32 twin.

    Attributes:
        make: makes the model.
        shard: shards it.
        options: of mpcompile.
        sharding: of fully_shard.
        compiled_first: whether mpcompile comes before fully_shard.
        optimizing: makes the optimizer of each of the two.
    """

    make: Callable[[], nn.Module] = Net
    shard: Callable[..., None] = shard_blocks
    options: dict[str, Any] = field(default_factory=dict)
    sharding: dict[str, Any] = field(default_factory=dict)
    compiled_first: bool = False
    optimizing: Optimizing = sgd

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.make()
        self.twin = copy.deepcopy(self.model)
        options: dict[str, Any] = {"dtype": torch.float16, "emit": "eager", "strict": True}
        if self.options.get("dtype") is not torch.bfloat16:
            options["loss_scale"] = LossScale.dynamic(2.0**10)
        options |= self.options
        if self.compiled_first:
            mpcompile(self.model, **options)
        self.shard(self.model, **self.sharding)
        if not self.compiled_first:
            mpcompile(self.model, **options)
        self.optimizer = self.optimizing(self.model)
        self.plain = self.optimizing(self.twin) if self.optimizing is sgd else sgd(self.twin)
        self.data = torch.Generator().manual_seed(1)

    def batches(self) -> torch.Tensor:
        """The batches of all ranks, (ranks, 4, 8)."""
        return torch.randn(dist.get_world_size(), 4, 8, generator=self.data)

    def backward(self, xs: torch.Tensor, factor: float = 1.0, gradient: float = 1.0) -> None:
        """The backward of this rank's batch, its loss or the loss's gradient times a factor."""
        result = self.model(xs[dist.get_rank()])
        if gradient != 1.0:
            result.register_hook(lambda grad: grad * gradient)
        (result.square().mean() * factor).backward()

    def twin_backward(self, xs: torch.Tensor) -> None:
        losses = [self.twin(x).square().mean() for x in xs]
        torch.stack(losses).mean().backward()

    def step(self, change: Callable[[nn.Module], Any] = lambda model: None) -> None:
        """A good step of both; `change` may change the gradients before it."""
        xs = self.batches()
        self.backward(xs)
        self.twin_backward(xs)
        self.take(change)

    def take(self, change: Callable[[nn.Module], Any] = lambda model: None) -> None:
        for model, optimizer in ((self.model, self.optimizer), (self.twin, self.plain)):
            change(model)
            optimizer.step()
            optimizer.zero_grad()

    def overflow(self, ranks: Sequence[int], *, gradient: bool = False) -> None:
        """A step whose gradients overflow on these ranks; it must change nothing, on any rank."""
        before, state = shards(self.model), loss_scale_of(self.model).state
        factor = OVERFLOW if dist.get_rank() in ranks else 1.0
        if gradient:
            self.backward(self.batches(), gradient=factor)
        else:
            self.backward(self.batches(), factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        after = loss_scale_of(self.model).state
        assert all(map(torch.equal, shards(self.model), before))
        assert after.skipped_steps == state.skipped_steps + 1
        assert after.scale == state.scale / 2
        assert everyones(after) == [after] * dist.get_world_size()

    def check(self, tolerance: float = 1e-3) -> None:
        """The parameters are those of the twin, up to the rounding of the low dtype."""
        mine = torch.cat([whole(p).flatten() for p in self.model.parameters()])
        wanted = torch.cat([p.detach().flatten() for p in self.twin.parameters()])
        assert (mine - wanted).norm() <= tolerance * wanted.norm()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def shards(model: nn.Module) -> list[torch.Tensor]:
    """What this rank holds of each parameter."""
    return [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore[operator]
