"""Overflows under DistributedDataParallel: ranks skip the same steps and have the same scale.

Whatever one rank alone has seen, all decide alike; no rank waits for one that does not come.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import Optimizing, check_same, everyones, flat, ours, sgd
from low_gradients import Net
from ranks import on_each_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from mpcompile import LossScale, loss_scale_of, mpcompile

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
    pytest.mark.slow("trains on ranks"),
]

OPTIONS: dict[str, Any] = {"dtype": torch.float16, "emit": "eager"}
START = 2.0**10
BAD = 2  # the step in which gradients overflow


def compiled(net: nn.Module, level: str = "O1", start: float | None = START) -> nn.Module:
    torch._dynamo.reset()
    return mpcompile(net, **OPTIONS, level=level, loss_scale=LossScale.dynamic(init_scale=start))


def parts(level: str, optimizing: Optimizing, start: float | None = START) -> tuple[Any, ...]:
    """A net that is compiled, a DDP of it, its optimizer and its loss scale."""
    torch.manual_seed(0)
    net = compiled(Net(), level, start)
    return net, DDP(net), optimizing(net), loss_scale_of(net)


def skips(optimizer: torch.optim.Optimizer, net: nn.Module) -> bool:
    """Take a step; whether it changed nothing."""
    before = flat(net)
    optimizer.step()
    return torch.equal(before, flat(net))


class Times(torch.autograd.Function):
    """The identity; its backward multiplies by `factor`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


# Every level, with a plain optimizer and with an MPOptimizer.
WAYS = list(itertools.product(("O1", "O2"), (sgd, ours)))


def plant(rank: int, where: str, level: str, optimizing: Optimizing) -> None:
    """One overflow, on one rank or on all: one skipped step, one move of the scale, everywhere."""
    net, model, optimizer, scale = parts(level, optimizing)
    for step in range(4):
        bad = step == BAD and (rank == 1 or where == "all")
        factor = 1e30 if bad else 1.0
        optimizer.zero_grad()
        if where == "accumulated":  # in a backward that reduces nothing
            with model.no_sync():
                (model(torch.randn(4, 8)).square().mean() * factor).backward()
            factor = 1.0
        out = model(torch.randn(4, 8))
        if where == "backward":  # the loss is finite
            out.square().mean().add(Times.apply(out, factor).mean()).backward()
        else:
            (out.square().mean() * factor).backward()
        assert skips(optimizer, net) == (step == BAD), f"{where}, step {step}"
    assert (scale.skipped_steps, scale.value) == (1, START / 2)
    check_same(net, scale.state_dict())


def positive(level: str) -> nn.Sequential:
    """A layer whose gradient, for positive inputs, overflows to inf and never to nan."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4, bias=False))
    compiled(net, level)
    return net


def clip_by_value(rank: int, level: str, optimizing: Optimizing) -> None:
    """After it all numbers are finite, on all ranks: only the count knows, and on all ranks."""
    for accumulated in (False, True):
        net = positive(level)
        model, optimizer = DDP(net), optimizing(net)
        for step in range(4):
            factor = 1e30 if step == BAD and rank == 0 else 1.0
            optimizer.zero_grad()
            if accumulated:
                with model.no_sync():
                    (model(torch.rand(4, 8)).sum() * factor).backward()
                factor = 1.0
            (model(torch.rand(4, 8)).sum() * factor).backward()
            torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)
            assert all(
                bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None
            )
            assert skips(optimizer, net) == (step == BAD), f"rank {rank}, step {step}"
        check_same(net, loss_scale_of(net).state_dict())
        assert loss_scale_of(net).value == START / 2


def in_the_first_backward(rank: int, **engine: bool) -> None:
    """With static_graph, DDP reduces after its first backward has ended."""
    net = positive("O1")
    model, optimizer = DDP(net, **engine), sgd(net)
    for step in range(2):
        optimizer.zero_grad()
        (model(torch.rand(4, 8)).sum() * (1e30 if step == rank == 0 else 1.0)).backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)
        assert skips(optimizer, net) == (step == 0), f"rank {rank}, step {step}, {engine}"


def thrown_away(rank: int, level: str, optimizing: Optimizing) -> None:
    """A loop that sees the norm, zeroes the gradients and goes on without a step."""
    net, model, optimizer, scale = parts(level, optimizing)
    for step in range(4):
        factor = 1e30 if step == BAD and rank == 0 else 1.0
        (model(torch.randn(4, 8)).square().mean() * factor).backward()
        if step > BAD:  # this forward has heard of it
            check_same(scale.value)
            assert scale.value == START / 2
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        if bool(torch.nn.utils.get_total_norm(gradients).isfinite()):
            optimizer.step()
        optimizer.zero_grad()
    check_same(net, scale.state_dict())
    assert (scale.skipped_steps, scale.value) == (0, START / 2)


def thrown_away_unseen(rank: int) -> None:
    """An overflow that only its own rank has seen, in a backward that reduced nothing: no rank may
    conclude anything from it, since the others can't.
    """
    net = positive("O1")
    model, optimizer, scale = DDP(net), sgd(net), loss_scale_of(net)
    for step in range(4):
        if step == BAD:
            with model.no_sync():
                (model(torch.rand(4, 8)).sum() * (1e30 if rank == 0 else 1.0)).backward()
            optimizer.zero_grad()
        model(torch.rand(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    check_same(net, scale.state_dict())
    assert (scale.skipped_steps, scale.value) == (0, START)


def by_hand(rank: int) -> None:
    """An update written by hand, under `overflowed()`."""
    net = positive("O1")
    model, scale = DDP(net), loss_scale_of(net)
    for step in range(4):
        net.zero_grad()
        factor = 1e30 if step == BAD and rank == 0 else 1.0
        (model(torch.rand(4, 8)).sum() * factor).backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)
        assert scale.overflowed() == (step == BAD)
    assert scale.value == START / 2


def several_models(rank: int) -> None:
    """Of two models, each in a DDP of its own, one overflows."""
    torch.manual_seed(0)
    nets = [compiled(Net()), mpcompile(Net(), **OPTIONS, loss_scale=LossScale.dynamic(START))]
    models, optimizers = [DDP(net) for net in nets], [sgd(net) for net in nets]
    for step in range(4):
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            factor = 1e30 if step == BAD and rank == k == 1 else 1.0
            (model(torch.randn(4, 8)).square().mean() * factor).backward()
            assert skips(optimizer, nets[k]) == (step == BAD and k == 1)
    check_same(*nets, *(loss_scale_of(net).state_dict() for net in nets))
    assert [loss_scale_of(net).value for net in nets] == [START, START / 2]


def not_distributed(rank: int) -> None:
    """A model that only one rank trains: it decides by itself, and nobody waits for anybody."""
    torch.manual_seed(0)
    net = compiled(Net())
    model, optimizer = DDP(net), sgd(net)
    mine = mpcompile(Net(), **OPTIONS)
    own = sgd(mine)
    for step in range(4):
        if rank == 0:
            own.zero_grad()
            factor = 1e38 if step == BAD else 1.0
            (mine(torch.randn(4, 8)).square().mean() * factor).backward()
            own.step()
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    assert loss_scale_of(mine).skipped_steps == (rank == 0)
    assert loss_scale_of(net).skipped_steps == 0
    check_same(net, loss_scale_of(net).state_dict())


def beside(rank: int, level: str, optimizing: Optimizing) -> None:
    """One optimizer over a DDP and over a head that each rank has for itself, and that overflows on
    one rank: the DDP's parameters must stay the same on all, so all skip.
    """
    torch.manual_seed(0)
    net = compiled(Net(), level)
    head = mpcompile(nn.Linear(4, 3), **OPTIONS, level=level, loss_scale=LossScale.dynamic(START))
    model = DDP(net)
    optimizer = optimizing(nn.ModuleList([net, head]))
    for step in range(4):
        factor = 1e30 if step == BAD and rank == 1 else 1.0
        optimizer.zero_grad()
        features = model(torch.randn(4, 8))
        loss = features.square().mean() + head(features.detach()).square().mean() * factor
        loss.backward()
        assert skips(optimizer, net) == (step == BAD), f"rank {rank}, step {step}"
    check_same(net, loss_scale_of(net).state_dict())


def _two(rank: int) -> None:
    torch.manual_seed(rank)
    for level, optimizing in WAYS:
        for where in ("one", "all", "backward", "accumulated"):
            plant(rank, where, level, optimizing)
        clip_by_value(rank, level, optimizing)
        thrown_away(rank, level, optimizing)
        beside(rank, level, optimizing)
    in_the_first_backward(rank, static_graph=True)
    in_the_first_backward(rank, find_unused_parameters=True)
    in_the_first_backward(rank, gradient_as_bucket_view=True)
    thrown_away_unseen(rank)
    by_hand(rank)
    several_models(rank)
    not_distributed(rank)


def test_two_processes_decide_alike() -> None:
    on_each_rank(_two)


def _four(rank: int) -> None:
    clip_by_value(rank, "O2", ours)
    plant(rank, "accumulated", "O1", sgd)


def test_four_processes_decide_alike() -> None:
    on_each_rank(_four, ranks=4)


# -- the start -----------------------------------------------------------------------------------


def starts_differ(rank: int, level: str, optimizing: Optimizing) -> None:
    """Ranks that find different starts go on with the least of them."""
    net, model, optimizer, scale = parts(level, optimizing, None)
    # A gradient that is 64 times as large fits a scale 64 times as small.
    (model(torch.ones(4, 8)).square().mean() * (2.0**16 if rank == 0 else 2.0**10)).backward()
    found = everyones(scale.value)
    assert found[0] < found[1]
    optimizer.step()
    assert (scale.value, scale.skipped_steps) == (min(found), 0)
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    check_same(net, scale.state_dict())


def one_finds_none(rank: int, level: str, optimizing: Optimizing) -> None:
    """A rank whose search fails takes the others' start; the step is skipped on all."""
    net, model, optimizer, scale = parts(level, optimizing, None)
    x = torch.full((4, 8), torch.inf) if rank == 1 else torch.ones(4, 8)
    model(x).square().mean().backward()
    found = everyones((scale.fitting and not scale.search.found, scale.value))
    assert [missing for missing, _ in found] == [False, True]
    optimizer.step()
    assert (scale.value, scale.skipped_steps) == (found[0][1] / 2, 1)
    check_same(net, scale.state_dict())


def none_finds_one(rank: int, level: str, optimizing: Optimizing) -> None:
    """As long as no rank has found a start, all go on searching; then they agree."""
    net, model, optimizer, scale = parts(level, optimizing, None)
    for value in (torch.inf, 1.0 + rank):
        optimizer.zero_grad()
        model(torch.full((4, 8), value)).square().mean().backward()
        optimizer.step()
        check_same(scale.fitting, scale.agreed, scale.state_dict())
        assert scale.fitting == (value == torch.inf)
    check_same(net)


def loaded(rank: int, optimizing: Optimizing) -> None:
    """A scale that was loaded, by mistake not the same on each rank: the least is taken."""
    net, model, optimizer, scale = parts("O2", optimizing, None)
    for step in range(4):
        if step == BAD:
            state = {**scale.state_dict(), "scale": START * (1 + rank)}
            scale.load_state_dict(state)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        assert step < BAD or scale.value == START
    check_same(net, scale.state_dict())


def _starts(rank: int) -> None:
    for level, optimizing in WAYS:
        starts_differ(rank, level, optimizing)
        one_finds_none(rank, level, optimizing)
        none_finds_one(rank, level, optimizing)
    loaded(rank, ours)
    loaded(rank, sgd)


def test_ranks_start_alike() -> None:
    on_each_rank(_starts)


def _statistics(rank: int) -> None:
    """What one rank's forward wrote to a buffer in a step that all skip."""
    for (level, optimizing), broadcast in itertools.product(WAYS, (True, False)):
        torch.manual_seed(0)
        layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        net = compiled(nn.Sequential(*layers), level)
        model, optimizer = DDP(net, broadcast_buffers=broadcast), optimizing(net)
        for step in range(4):
            x = torch.randn(4, 8) * (2e5 if step == BAD and rank == 1 else 1.0)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert loss_scale_of(net).skipped_steps == 1
        assert all(bool(b.isfinite().all()) for b in net.buffers())
        check_same(net, loss_scale_of(net).state_dict())
        assert bool(net.eval()(x[:1] / 2e5).isfinite().all())


def test_buffers_of_a_skipped_step_stay_finite() -> None:
    on_each_rank(_statistics)
