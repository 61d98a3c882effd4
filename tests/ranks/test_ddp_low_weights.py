"""DistributedDataParallel over weights that are BF16 already."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_rank
from torch import nn

from mpcompile import MPOptimizer, compiled_plans, mpcompile

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from torch.nn.parallel import DistributedDataParallel

BF16 = torch.bfloat16


def _trains(rank: int, levels: list[str]) -> None:
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
                assert p.grad is not None
                assert q.grad is not None
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


def test_gradients_are_averaged_and_masters_agree() -> None:
    on_each_rank(_trains, ["O1", "O2"])
