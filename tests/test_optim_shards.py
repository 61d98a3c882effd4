"""MPOptimizer over sharded parameters: FSDP2's and others' DTensors, on processes that use gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from mpcompile import LossScale, MPOptimizer
from mpcompile.errors import MPCompileError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)  # type: ignore[arg-type]


def momentum(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def amsgrad(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, amsgrad=True)  # type: ignore[arg-type]


class Net(nn.Module):
    """Matrices whose rows no 2 or 4 ranks share evenly: 5, and 3 (over 4, one rank has none)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return y


def whole(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All elements of these, of DTensors those of all ranks."""
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in full])


def state_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """All tensors of an optimizer's state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return whole(optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p]))


STEPS, OVERFLOW = 4, 2


def train(rank: int, ranks: int, make: Make, norm: float | None, **options: Any) -> None:
    """Steps beside plain FP64 ones in each process over all data; one gradient overflows in one
    rank's shard.
    """
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net).double()
    fully_shard(net)
    scale = LossScale.dynamic(init_scale=8.0)
    options = {"emit": "eager", "loss_scale": scale, "max_grad_norm": norm, **options}
    mine, plain = MPOptimizer(make(net.parameters()), **options), make(reference.parameters())
    data = torch.randn(STEPS, ranks, 7, 6, generator=torch.Generator().manual_seed(1))
    for step, xs in enumerate(data):
        mine.zero_grad()
        plain.zero_grad()
        net(xs[rank]).square().mean().backward()
        sum(reference(x.double()).square().mean() for x in xs).div(ranks).backward()  # type: ignore[union-attr]
        if step == OVERFLOW:
            before = whole(net.parameters()), state_of(mine)
            if rank == 1:
                gradient: Any = net.fc1.weight.grad
                gradient.to_local()[0, 0] = torch.inf
        if norm is not None:
            norms = nn.utils.clip_grad_norm_(reference.parameters(), norm)
        with CommDebugMode() as sent:
            mine.step()
        assert sent.get_total_counts() == 1
        assert bool(mine.skipped) == (step == OVERFLOW), f"rank {rank}, step {step}"
        if step == OVERFLOW:
            assert torch.equal(whole(net.parameters()), before[0])
            assert torch.equal(state_of(mine), before[1])
            continue
        plain.step()
        if norm is not None:
            torch.testing.assert_close(mine.grad_norm.double(), norms, rtol=1e-6, atol=0)
    assert (scale.value, mine.skipped_steps) == (4.0, 1)
    torch.testing.assert_close(
        whole(net.parameters()).double(), whole(reference.parameters()), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(state_of(mine).double(), state_of(plain), rtol=1e-5, atol=1e-6)


def _two(rank: int) -> None:
    for make in (adamw, momentum, amsgrad):
        for norm in (None, 0.05):
            train(rank, 2, make, norm)


if __name__ == "__main__":
    on_each_rank(_two, ranks=2)
