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

import math
import time

import pytest
import torch.distributed as dist
from ddp_training import check_same, whole
from fsdp_training import Net, shard_blocks
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from mpcompile import MPCompileError

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


# What a training step sends to the other ranks: no more than with autocast and a GradScaler.


if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)


SIZES = {"float": 4, "double": 8, "int": 4, "long int": 8}  # of what gloo sends, by its name


def counted(engine: Callable[[nn.Module], nn.Module], *, ours: bool) -> tuple[int, int]:
    """Collectives of a step, and the bytes of the tensors in them."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = engine(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=not ours)
    if ours:
        mpcompile(model, dtype=torch.float16, level="O2", emit="eager")
        optimizer = MPOptimizer(optimizer, emit="eager")

    def step() -> None:
        with torch.autocast("cpu", torch.float16, enabled=not ours):
            loss = model(torch.randn(4, 8)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(3):  # DDP makes its buckets, and the loss scale is found
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
        time.sleep(0.2)  # gloo's thread ends its event after those that wait for it go on
    events = [e for e in seen.profiler.kineto_results.events() if e.name().startswith("gloo:")]
    return len(events), sum(SIZES[e.dtypes()[0]] * math.prod(e.shapes()[0]) for e in events)


def _sends_no_more(rank: int) -> None:
    for engine in (DistributedDataParallel, shard_blocks):
        theirs, mine = (counted(engine, ours=ours) for ours in (False, True))
        assert 0 < mine[0] <= theirs[0], (engine, mine, theirs)
        # What FSDP2's ranks agree on is FP64 in ours, FP32 in a GradScaler: 4 bytes more.
        assert mine[1] <= theirs[1] + 4, (engine, mine, theirs)


@pytest.mark.slow("two processes that train four times")
def test_a_step_sends_no_more_than_under_autocast() -> None:
    on_each_rank(_sends_no_more)


# What mpcompile can't train under torch's sharding engines is refused, not trained wrongly.


if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def compiled(model: nn.Module) -> nn.Module:
    return mpcompile(model, dtype=torch.float16, emit="eager")


def refused(make: Any, match: str) -> None:
    """At the call of mpcompile, or, where the engine comes after it, in the first forward."""
    with pytest.raises(MPCompileError, match=match):
        compiled(make(net()))
    model = make(compiled(net()))
    with pytest.raises(MPCompileError, match=match):
        model(torch.randn(2, 8))


def _refusals(rank: int) -> None:
    for policy, match in (
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), "Leave param_dtype out"),
        (MixedPrecisionPolicy(output_dtype=torch.bfloat16), "Leave output_dtype out"),
    ):
        refused(lambda model, policy=policy: fully_shard(model, mp_policy=policy), match)

    for orig in (True, False):
        refused(
            lambda model, orig=orig: FullyShardedDataParallel(
                model, use_orig_params=orig, device_id=torch.device("cpu")
            ),
            "fully_shard",
        )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def split(model: nn.Module) -> nn.Module:
        return parallelize_module(model, mesh["tensor"], plan)  # type: ignore[arg-type]

    refused(split, "tensor parallelism")
    refused(lambda model: fully_shard(split(model), mesh=mesh["data"]), "tensor parallelism")


def test_engines_and_dtypes_that_do_not_go_with_it() -> None:
    on_each_rank(_refusals, ranks=4)
