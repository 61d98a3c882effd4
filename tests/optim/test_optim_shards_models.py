"""MPOptimizer over FSDP2's shards of compiled models, at O1 and O2 in FP16, on two processes."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from low_gradients import Net
from ranks import on_each_rank
from torch import nn
from torch.distributed.fsdp import fully_shard

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.ir.scale import INIT_SCALE

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


OVERFLOW = 2


def train(rank: int, level: str, norm: float | None, *, hidden: bool) -> None:
    """Steps beside a plain FP32 model that sees the data of all ranks; in one a backward overflows
    on one rank. `hidden`: its gradients are zeroed, so that this rank's graphs alone know of it.
    """
    torch.manual_seed(0)
    net = Net(width=17)
    reference = copy.deepcopy(net)
    fully_shard(net)
    scale = LossScale.dynamic(init_scale=2.0**10)
    model: Any = mpcompile(net, level=level, dtype=torch.float16, emit="eager", strict=True,
                           loss_scale=scale)  # fmt: skip
    optimizer = MPOptimizer(
        torch.optim.AdamW(net.parameters(), lr=0.01), max_grad_norm=norm, emit="eager"
    )
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    data = torch.randn(5, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    for step, xs in enumerate(data):
        before = whole(net)
        optimizer.zero_grad()
        factor = 1e30 if step == OVERFLOW and rank == 0 else 1.0
        (model(xs[rank]).square().mean() * factor).backward()
        if step == OVERFLOW and hidden:
            for p in net.parameters():
                p.grad.zero_()  # type: ignore[union-attr]
        optimizer.step()
        assert bool(optimizer.skipped) == (step == OVERFLOW), (rank, step)
        if step == OVERFLOW:
            assert torch.equal(whole(net), before)
            continue
        plain.zero_grad()
        sum(reference(x).square().mean() for x in xs).div(2).backward()  # type: ignore[union-attr]
        if norm is not None:
            wanted = nn.utils.clip_grad_norm_(reference.parameters(), norm)
            torch.testing.assert_close(optimizer.grad_norm, wanted, rtol=1e-2, atol=0)
        plain.step()
    assert (scale.value, scale.skipped_steps) == (2.0**9, 1)
    mine = whole(net)
    wanted = torch.cat([p.detach().flatten() for p in reference.parameters()])
    assert (mine - wanted).norm() <= 1e-2 * wanted.norm()


def start_in_a_closure(rank: int) -> None:
    """The forward that searches for the scale runs inside of the step; another fits each rank."""
    torch.manual_seed(0)
    net = Net(width=17)
    fully_shard(net)
    model: Any = mpcompile(net, level="O1", dtype=torch.float16, emit="eager", strict=True)
    optimizer = MPOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), emit="eager")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(4, 8)).square().mean() * (1e6 if rank == 0 else 1.0)
        loss.backward()
        return loss

    optimizer.step(closure)
    scale = loss_scale_of(net).value
    found: list[Any] = [None, None]
    dist.all_gather_object(found, scale)
    assert found == [scale, scale]
    assert scale < INIT_SCALE  # rank 1 alone would have started there


def whole(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()])  # type: ignore[attr-defined]


def _two(rank: int) -> None:
    for level in ("O1", "O2"):
        for norm in (None, 0.1):
            train(rank, level, norm, hidden=norm is None)
    start_in_a_closure(rank)


@pytest.mark.slow("trains with several optimizers")
def test_two_ranks_follow_one_process() -> None:
    on_each_rank(_two)
