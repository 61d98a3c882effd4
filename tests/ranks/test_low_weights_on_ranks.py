"""DDP and FSDP2 over weights that are BF16 already; FSDP2's masters are sharded like them."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_rank
from torch import nn

from mpcompile import MPOptimizer, compiled_plans, mpcompile

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from ddp_training import check_same, whole
from fsdp_training import Net, shard_blocks
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

BF16 = torch.bfloat16


def _optimizer(model: nn.Module) -> MPOptimizer:
    return MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-6), max_grad_norm=0.5,
                       emit="eager")  # fmt: skip


def _train(rank: int, engine: Callable[..., Any], level: str, first: bool) -> None:
    torch.manual_seed(0)
    model = Net().to(BF16)
    start, twin = copy.deepcopy(model), copy.deepcopy(model).float()
    masters = [p.detach().float() for p in model.parameters()]
    options = {"emit": "eager", "strict": True, "level": level}
    if first:
        mpcompile(model, **options)
    called = engine(model)
    if not first:
        mpcompile(called, **options)
    optimizer, plain = _optimizer(called), torch.optim.AdamW(masters, lr=1e-6)
    data = torch.Generator().manual_seed(1)

    def step() -> None:
        xs = torch.randn(2, 6, 8, generator=data).to(BF16)
        called(xs[rank]).float().square().mean().backward()
        torch.nn.utils.vector_to_parameters(
            torch.cat([whole(p).float().flatten() for p in called.parameters()]), twin.parameters()
        )
        twin.zero_grad()
        sum(twin(x.float()).square().mean() / 2 for x in xs).backward()  # type: ignore[union-attr]
        for p, q, master in zip(called.parameters(), twin.parameters(), masters, strict=True):
            assert p.grad.dtype is BF16
            master.grad = whole(p.grad).float()
            assert (master.grad - q.grad).norm() < 0.05 * q.grad.norm()
        optimizer.step()
        optimizer.zero_grad()
        torch.nn.utils.clip_grad_norm_(masters, 0.5)
        plain.step()

    for _ in range(3):
        step()
    with torch.no_grad():  # what is written to the weights, or to their shards, holds
        model.last.weight.mul_(0.5)
        masters[-2].copy_(whole(model.last.weight))
    step()
    assert any(plan.counts().get("LOW") for plan in compiled_plans(called))
    assert not any(plan.left for plan in compiled_plans(called))
    for p, master in zip(called.parameters(), masters, strict=True):
        held = whole(optimizer.state[p]["master"])
        torch.testing.assert_close(held, master, rtol=1e-6, atol=1e-8)
        assert torch.equal(whole(p), held.to(BF16))
        check_same(held.tolist())
    assert any(not torch.equal(whole(p), q) for p, q in
               zip(called.parameters(), start.parameters(), strict=True))  # fmt: skip
    saved = get_optimizer_state_dict(called, optimizer)
    again = _optimizer(called)
    set_optimizer_state_dict(called, again, saved)
    for p in called.parameters():
        mine, theirs = again.state[p]["master"], optimizer.state[p]["master"]
        assert torch.equal(whole(mine), whole(theirs))
        assert getattr(mine, "placements", None) == getattr(p, "placements", None)


def _each(rank: int, engine: Callable[..., Any], rows: list[tuple[str, bool]]) -> None:
    for level, first in rows:
        _train(rank, engine, level, first)


@pytest.mark.slow("trains on ranks")
def test_gradients_are_averaged_and_masters_agree() -> None:
    on_each_rank(_each, DistributedDataParallel, [("O1", True), ("O2", True)])


@pytest.mark.slow("trains on ranks")
def test_masters_are_sharded() -> None:
    on_each_rank(_each, shard_blocks, list(itertools.product(("O1", "O2"), (False, True))))
