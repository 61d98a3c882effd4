"""O2 with an MPOptimizer under DistributedDataParallel, on two processes that talk through gloo."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import join, on_each_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpcompile import LossScale, MPOptimizer, mpcompile
from mpcompile.state.copies import copies_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(F.gelu(self.norm(self.fc1(x))))
        return y


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


OVERFLOW = 2  # the step at which a gradient of the first rank overflows


def train(rank: int, ranks: int, order: str, dtype: torch.dtype) -> None:
    """Some steps beside a plain FP32 model that sees the data of all ranks."""
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    scale = LossScale.dynamic(init_scale=2.0**10) if dtype is torch.float16 else "dynamic"
    options: dict[str, Any] = {"dtype": dtype, "emit": "eager", "strict": True}
    options |= {"level": "O2", "loss_scale": scale}

    def held() -> MPOptimizer:
        return MPOptimizer(sgd(net), emit="eager")

    if order == "used before":
        mpcompile(net, **options)
        optimizer = held()
        net(torch.randn(4, 8)).mean().backward()  # low gradients, in the dtype they are stored in
        model: nn.Module = DistributedDataParallel(net)
    elif order == "mpcompile(DDP), optimizer first":
        optimizer = held()
        model = mpcompile(DistributedDataParallel(net), **options)
    elif order == "mpcompile(DDP)":
        model = mpcompile(DistributedDataParallel(net), **options)
        optimizer = held()
    else:
        optimizer = held()
        model = DistributedDataParallel(mpcompile(net, **options))
    plain = sgd(reference)
    data = torch.randn(4, ranks, 4, 8, generator=torch.Generator().manual_seed(1))
    for step, xs in enumerate(data):
        overflows = step == OVERFLOW and dtype is torch.float16
        optimizer.zero_grad()
        factor = 1e30 if overflows and rank == 0 else 1.0
        (model(xs[rank]).square().mean() * factor).backward()
        optimizer.step()
        assert bool(optimizer.skipped) == overflows, f"rank {rank}, step {step}"
        if not overflows:
            plain.zero_grad()
            sum(reference(x).square().mean() for x in xs).div(ranks).backward()  # type: ignore[union-attr]
            plain.step()
    if isinstance(scale, LossScale):
        assert scale.value == 2.0**9
    assert len([k for p in net.parameters() for k in copies_of(p)]) == 4
    mine = nn.utils.parameters_to_vector(net.parameters()).detach()
    everyones = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyones, mine)
    assert all(torch.equal(other, mine) for other in everyones)
    wanted = nn.utils.parameters_to_vector(reference.parameters())
    assert (mine - wanted).norm() <= 1e-2 * wanted.norm()


ORDERS = ["DDP(mpcompile)", "mpcompile(DDP)", "mpcompile(DDP), optimizer first", "used before"]


@pytest.fixture(autouse=True)
def products_run_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are: a device profile would leave them in FP32."""
    monkeypatch.setenv("MPCOMPILE_PROFILE", "none")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_one_process_trains_as_in_fp32(order: str, dtype: torch.dtype, tmp_path: Path) -> None:
    join(0, 1, str(tmp_path))
    try:
        train(0, 1, order, dtype)
    finally:
        dist.destroy_process_group()


def _two(rank: int) -> None:
    for order in ("DDP(mpcompile)", "mpcompile(DDP)"):
        train(rank, 2, order, torch.float16)


def test_two_processes_stay_the_same_and_skip_together() -> None:
    on_each_rank(_two)
