"""What a training step sends to the other ranks: no more than with autocast and a GradScaler."""

import math
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_rank
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mpcompile import MPOptimizer, mpcompile

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from fsdp_training import Net, shard_blocks
from torch.nn.parallel import DistributedDataParallel

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
