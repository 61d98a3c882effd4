"""DDP and FSDP2 over weights that are BF16 already; FSDP2's masters are sharded like them."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_rank
from torch import nn

from mpcompile import MPOptimizer, compiled_plans, mpcompile

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from ddp_training import whole
from fsdp_training import Net, shard_blocks
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

BF16 = torch.bfloat16


def _ddp_trains(rank: int, levels: list[str]) -> None:
    for level in levels:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(BF16)
        twin = copy.deepcopy(model).float()
        masters = [p.detach().float() for p in model.parameters()]
        ddp = DistributedDataParallel(mpcompile(model, emit="eager", strict=True, level=level))
        optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-6), emit="eager")
        plain = torch.optim.AdamW(masters, lr=1e-6)
        data = torch.Generator().manual_seed(1)
        for _ in range(3):
            xs = torch.randn(2, 6, 8, generator=data).to(BF16)
            ddp(xs[rank]).float().square().mean().backward()
            twin.load_state_dict(model.state_dict())
            twin.zero_grad()
            sum(twin(x.float()).square().mean() / 2 for x in xs).backward()
            for p, q, master in zip(model.parameters(), twin.parameters(), masters, strict=True):
                assert (p.grad.float() - q.grad).norm() < 0.05 * q.grad.norm()
                master.grad = p.grad.float()
            optimizer.step()
            optimizer.zero_grad()
            plain.step()
        assert any(plan.counts().get("LOW") for plan in compiled_plans(model))
        for p, master in zip(model.parameters(), masters, strict=True):
            held = optimizer.state[p]["master"]
            torch.testing.assert_close(held, master, rtol=1e-6, atol=1e-8)
            everyones = [torch.empty_like(held) for _ in range(2)]
            dist.all_gather(everyones, held)
            assert torch.equal(*everyones)


@pytest.mark.slow("trains on ranks")
def test_gradients_are_averaged_and_masters_agree() -> None:
    on_each_rank(_ddp_trains, ["O1", "O2"])


def _optimizer(model: torch.nn.Module) -> MPOptimizer:
    return MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-6), max_grad_norm=0.5,
                       emit="eager")  # fmt: skip


def _fsdp_trains(rank: int, level: str, first: bool) -> None:
    torch.manual_seed(0)
    model = Net().to(BF16)
    start = copy.deepcopy(model)
    masters = [p.detach().float() for p in model.parameters()]
    options = {"emit": "eager", "strict": True, "level": level}
    if first:
        mpcompile(model, **options)
    shard_blocks(model)
    if not first:
        mpcompile(model, **options)
    optimizer, plain = _optimizer(model), torch.optim.AdamW(masters, lr=1e-6)

    def step(*, by_hand: bool = True) -> None:
        model(torch.randn(4, 8, generator=data).to(BF16)).float().square().mean().backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            assert p.grad.dtype is BF16
            master.grad = whole(p.grad).float()
        optimizer.step()
        optimizer.zero_grad()
        if by_hand:
            torch.nn.utils.clip_grad_norm_(masters, 0.5)
            plain.step()

    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        step()
    with torch.no_grad():  # what is written to the shards holds
        model.last.weight.mul_(0.5)
        masters[-2].copy_(whole(model.last.weight))
    step()
    assert any(plan.counts().get("LOW") for plan in compiled_plans(model))
    assert not any(plan.left for plan in compiled_plans(model))
    for p, master in zip(model.parameters(), masters, strict=True):
        held = whole(optimizer.state[p]["master"])
        torch.testing.assert_close(held, master, rtol=1e-6, atol=1e-8)
        assert torch.equal(whole(p), held.to(BF16))
    assert any(not torch.equal(whole(p), q) for p, q in
               zip(model.parameters(), start.parameters(), strict=True))  # fmt: skip
    saved = get_optimizer_state_dict(model, optimizer)
    again = _optimizer(model)
    set_optimizer_state_dict(model, again, saved)
    for p in model.parameters():
        mine, theirs = again.state[p]["master"], optimizer.state[p]["master"]
        assert torch.equal(whole(mine), whole(theirs))
        assert mine.placements == p.placements


def _each(rank: int, rows: list[tuple[str, bool]]) -> None:
    for level, first in rows:
        _fsdp_trains(rank, level, first)


@pytest.mark.slow("trains on ranks")
def test_masters_are_sharded() -> None:
    on_each_rank(_each, list(itertools.product(("O1", "O2"), (False, True))))
