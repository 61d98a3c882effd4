"""What DistributedDataParallel sends: the low dtype at O2, times the loss scale; else FP32."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import Case, check_same, flat, sent, sgd, train
from low_gradients import Net
from ranks import on_each_rank
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile

pytestmark = [
    pytest.mark.slow("trains on ranks"),
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
RANKS = 2


def low(net: nn.Module, start: float | None = 2.0**10, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    scale = {} if start is None else {"loss_scale": LossScale.dynamic(init_scale=start)}
    return mpcompile(net, **{"dtype": FP16, "level": "O2", "emit": "eager", **scale, **options})


def elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def which_dtypes() -> None:
    """In the first backward, which searches for the scale, FP32; then what was asked for."""
    for options, wanted in (
        ({"level": "O2"}, FP16),
        ({"level": "O3"}, FP16),
        ({"level": "O1", "reduce": "low"}, FP16),
        ({"level": "O2", "dtype": BF16}, BF16),
        ({"level": "O1"}, None),
        ({"level": "O2", "reduce": "fp32"}, None),
    ):
        torch.manual_seed(0)
        net = low(Net(), None, **options)
        model, optimizer, scaled = DDP(net), sgd(net), wanted is FP16
        for step in range(3):
            optimizer.zero_grad()
            with sent() as known:
                model(torch.randn(4, 8)).square().mean().backward()
            dtypes = [dtype for dtype, count in known if count == elements(net)]
            first = FP32 if scaled else wanted
            now = first if step == 0 else wanted
            assert dtypes == ([] if now is None else [now]), (options, step, known)
            with sent() as known:
                optimizer.step()
            # One exchange, in the first step after a search; a step takes no part in reductions.
            assert len(known) <= (step == 0), (options, step, known)


def small_and_large(rank: int) -> None:
    """Gradients far below FP16's range arrive; a sum over ranks that FP16 does not hold, too."""
    for factor, start in ((1e-7, 2.0**24), (1.0, None)):
        torch.manual_seed(0)
        net = low(nn.Sequential(nn.Linear(8, 4, bias=False)), start)
        x = torch.rand(4, 8) + 0.5
        if start is None:  # each rank sends at least 0.9 of what FP16 holds, if it didn't divide
            each = x.sum(0).max()
            start = float(0.95 * torch.finfo(FP16).max / each)
            net = low(nn.Sequential(nn.Linear(8, 4, bias=False)), start)
        model = DDP(net)
        with sent() as known:
            (model(x).sum() * factor).backward()
        assert (FP16, 32) in known
        wanted = (x.sum(0).double() * factor).expand(4, 8).flatten()
        error = (gradients(net).double() - wanted).abs().max() / wanted.abs().max()
        assert error < 2.0**-9, (factor, error)
        optimizer = sgd(net)
        optimizer.step()
        assert loss_scale_of(net).skipped_steps == 0


class Mixed(nn.Module):
    """A compiled layer, and a weight beside it whose gradient FP16 does not hold at any scale."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = low(nn.Linear(8, 4, bias=False))
        self.weight = nn.Parameter(torch.ones(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc(x).square().mean() + (self.weight * 1e30).sum()
        return y


def unscaled_beside_scaled(rank: int) -> None:
    """A bucket that holds a gradient of no scaled graph goes in FP32; the others go low."""
    first = dist._DEFAULT_FIRST_BUCKET_BYTES
    for megabytes, wanted in ((25, [(FP32, 72)]), (1e-4, [(FP16, 32), (FP32, 40)])):
        torch.manual_seed(0)
        net = Mixed()
        # Dynamo wants the first bucket to be the smallest.
        dist._DEFAULT_FIRST_BUCKET_BYTES = min(first, int(megabytes * 2**20))
        model = DDP(net, bucket_cap_mb=megabytes)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-33)
        for _ in range(4):
            optimizer.zero_grad()
            with sent() as known:
                model(torch.randn(4, 8)).backward()
            optimizer.step()
        assert sorted(known, key=str) == wanted, known
        assert loss_scale_of(net.fc).skipped_steps == 0
        assert net.weight.grad is not None
        assert torch.equal(net.weight.grad, torch.full((40,), 1e30))
    dist._DEFAULT_FIRST_BUCKET_BYTES = first


def averaged(_: Any, bucket: Any) -> Any:
    assert bucket.buffer().dtype is FP32
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(RANKS))


def hooks_of_users(rank: int) -> None:
    """They get unscaled gradients in FP32; overflows are counted behind them."""
    reference = None
    for name in ("own", "fp16", "builtin", "power"):
        torch.manual_seed(0)
        net = low(Net())
        model, optimizer = DDP(net), MPOptimizer(sgd(net), emit="eager")
        if name == "own":
            averaged.__annotations__.clear()  # DDP refuses them as text
            model.register_comm_hook(None, averaged)
        elif name == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "builtin":
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            factor = 1e30 if step == 1 and rank == 0 else 1.0
            optimizer.zero_grad()
            (model(x).square().mean() * factor).backward()
            before = flat(net)
            optimizer.step()
            assert torch.equal(before, flat(net)) == (step == 1), (name, step)
        check_same(net, loss_scale_of(net).state_dict())
        assert loss_scale_of(net).value == 2.0**9
        reference = flat(net) if reference is None else reference
        if name != "power":  # an approximation of rank 1
            assert (flat(net) - reference).norm() <= 1e-3 * reference.norm()


def copies_of_models(rank: int) -> None:
    """Our hook is in no copy and no pickle; both are plain DDPs that can be compiled."""
    plain = DDP(Net())
    model = mpcompile(DDP(Net()), dtype=FP16, level="O2", emit="eager")
    optimizer = MPOptimizer(sgd(model), emit="eager")
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {p.dtype for p in model.state_dict().values()} == {FP32}
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert not again._comm_hooks
        assert vars(again.module).keys() == vars(plain.module).keys()
        assert {type(p) for p in again.parameters()} == {nn.Parameter}
        check_same(again)
        with sent() as known:
            again(torch.randn(4, 8)).square().mean().backward()
        assert known == []  # DDP's own reduction, in C++
        mpcompile(again, dtype=BF16, level="O2", emit="eager")
        with sent() as known:
            again(torch.randn(4, 8)).square().mean().backward()
        assert BF16 in dict(known)


def _two(rank: int) -> None:
    torch.manual_seed(rank)
    which_dtypes()
    small_and_large(rank)
    unscaled_beside_scaled(rank)
    hooks_of_users(rank)
    copies_of_models(rank)
    with sent() as known:  # behind Dynamo's splits each bucket goes low by itself
        train(rank, 2, Case(splits=True))
    assert [dtype for dtype, _ in known[-3:]] == [FP16] * 3, known


def test_what_two_processes_send() -> None:
    on_each_rank(_two, ranks=RANKS)
