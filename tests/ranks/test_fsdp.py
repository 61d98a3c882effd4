"""FSDP2 on processes that talk through gloo: each trains as one process on the global batch."""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_each_rank
from torch import nn

from mpcompile import MPOptimizer, compiled_plans, loss_scale_of
from mpcompile.compiler import graph_function
from mpcompile.ir.scale import INIT_SCALE
from mpcompile.lower.joint import JointPasses, joint_passes

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from ddp_training import OVERFLOW, Training, everyones, ours, sgd
from fsdp_training import Net, sequential, shard_blocks, shard_root
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

pytestmark = pytest.mark.inside

training = functools.partial(Training, Net, shard_blocks)
WAYS = list(itertools.product((Net, sequential), (shard_blocks, shard_root)))

MODES = list(itertools.product(("O1", "O2"), (torch.float16, torch.bfloat16)))
EACH = list(itertools.product(WAYS, (False, True), MODES))
# Each way in FP16 at O2; each order, level and dtype at least once.
SOME = [(WAYS[i], bool(i % 2), MODES[2]) for i in range(4)]
SOME += [(WAYS[0], True, MODES[1]), (WAYS[2], True, MODES[0]), (WAYS[1], False, MODES[3])]


def _trains_and_skips(rank: int, rows: list[Any]) -> None:
    for way, first, (level, dtype) in rows:
        order = "mpcompile, engine, optimizer" if first else "engine, mpcompile, optimizer"
        run = Training(*way, options={"level": level, "dtype": dtype}, order=order)
        run.step()
        run.step()
        plans = compiled_plans(run.model)
        # Each linear layer is in a graph, and none is in two.
        low = sum(plan.counts().get("LOW", 0) for plan in plans)
        assert low >= sum(isinstance(m, nn.Linear) for m in run.model.modules())
        assert not any(plan.left for plan in plans)
        if dtype is torch.float16:
            run.overflow([0])
            run.overflow([0, 1])
            run.overflow([1], gradient=True)
        run.step(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        run.step(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))
        assert len(compiled_plans(run.model)) == len(plans)
        run.check(2e-3 if dtype is torch.bfloat16 else 3e-4)


@pytest.mark.slow("trains on ranks")
def test_both_orders_any_root_and_whichever_rank_overflows() -> None:
    on_each_rank(_trains_and_skips, SOME)


@pytest.mark.sweep("the rest of a matrix, on ranks")
def test_every_order_root_level_and_dtype() -> None:
    on_each_rank(_trains_and_skips, [row for row in EACH if row not in SOME])


def _keeps_no_casts(rank: int) -> None:
    """FSDP frees weights between their uses: a low copy that stays would take that back."""
    asked: list[bool] = []

    def passes(*args: Any, sharded: bool, **kwargs: Any) -> JointPasses:
        asked.append(sharded)
        return joint_passes(*args, sharded=sharded, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graph_function, "joint_passes", passes)
        training(options={"level": "O1"}).step()
    assert asked
    assert all(asked)


@pytest.mark.slow("trains on ranks")
def test_casts_of_shards_are_not_kept() -> None:
    on_each_rank(_keeps_no_casts)


def _clipped_by_value(rank: int) -> None:
    """Clipping by value makes an infinite gradient an ordinary one before the step looks."""
    for level, optimizing in itertools.product(("O1", "O2"), (sgd, ours)):
        run = training(options={"level": level}, optimizing=optimizing)
        run.step()
        before = [p.detach().clone() for p in run.model.parameters()]
        run.backward(run.batches(), OVERFLOW if rank == 1 else 1.0)
        for p in run.model.parameters():
            p.grad.to_local().nan_to_num_(nan=0.5, posinf=0.5, neginf=-0.5)  # type: ignore[attr-defined]
        run.optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(run.model.parameters(), before, strict=True))
        assert loss_scale_of(run.model).value == 2.0**9
        run.optimizer.zero_grad()
        run.step()
        run.check(3e-4)


def _thrown_away(rank: int) -> None:
    """An overflow on one rank whose gradients no step uses lowers the scale of all."""
    run = training(options={"level": "O2"})
    run.step()
    run.backward(run.batches(), OVERFLOW if rank == 0 else 1.0)
    run.optimizer.zero_grad()
    run.step()
    scale = loss_scale_of(run.model)
    assert (scale.value, scale.skipped_steps) == (2.0**9, 0)
    run.check(3e-4)


def _accumulated(rank: int) -> None:
    """Three batches in a step, of which only the last one exchanges gradients."""
    for level in ("O1", "O2"):
        run = training(options={"level": level})
        for planted in (None, 0, 1, 2, None):
            before = [p.detach().clone() for p in run.model.parameters()]
            for batch in range(3):
                run.model.set_requires_gradient_sync(batch == 2)  # type: ignore[operator]
                xs = run.batches()
                run.backward(xs, OVERFLOW if (rank, batch) == (1, planted) else 1.0)
                if planted is None:
                    run.twin_backward(xs)
            if planted is None:
                run.take()
                continue
            run.optimizer.step()
            run.optimizer.zero_grad()
            after = run.model.parameters()
            assert all(torch.equal(p, b) for p, b in zip(after, before, strict=True))
        scale = loss_scale_of(run.model)
        assert (scale.value, scale.skipped_steps) == (2.0**7, 3)
        run.check(3e-4)


def _searched(rank: int) -> None:
    """The start of the scale is searched on each rank, and is the least of all afterwards."""
    for level in ("O1", "O2"):
        for settings in ({"reshard_after_forward": False}, {"reshard_after_forward": True}):
            run = training(options={"level": level, "loss_scale": "dynamic"}, settings=settings)
            xs = run.batches()
            factor = 2.0**10 if rank == 0 else 1.0  # gradients that fit lower scales only
            run.backward(xs, factor)
            scale = loss_scale_of(run.model)
            starts = everyones(scale.value)
            run.optimizer.step()
            assert starts[0] < starts[1]
            assert everyones((scale.value, scale.skipped_steps)) == [(starts[0], 0)] * 2
            run.optimizer.zero_grad()
            run.overflow([1])


def _searched_in_a_closure(rank: int) -> None:
    """The forward that searches for the scale runs inside of the step; another fits each rank."""
    run = training(options={"level": "O1", "loss_scale": "dynamic"}, optimizing=ours)

    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss: torch.Tensor = run.model(torch.ones(4, 8)).square().mean()
        loss = loss * (1e6 if rank == 0 else 1.0)
        loss.backward()
        return loss

    run.optimizer.step(closure)
    scale = loss_scale_of(run.model).value
    assert everyones(scale) == [scale] * 2
    assert scale < INIT_SCALE  # rank 1 alone would have started there


def _generated(rank: int) -> None:
    """MPOptimizer's compiled step over the shards, which clips by the norm over all ranks."""
    for level in ("O1", "O2"):

        def optimizing(model: nn.Module) -> torch.optim.Optimizer:
            return MPOptimizer(sgd(model), max_grad_norm=0.1, emit="eager")

        run = training(options={"level": level}, optimizing=optimizing)

        def clip(model: nn.Module, run: Training = run) -> None:
            if model is run.twin:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        run.step(clip)
        run.overflow([1])
        run.overflow([0], gradient=True)
        run.step(clip)
        run.step(clip)
        run.check(3e-4)


def _in_turn(rank: int) -> None:
    _clipped_by_value(rank)
    _thrown_away(rank)
    _accumulated(rank)
    _searched(rank)
    _searched_in_a_closure(rank)
    _generated(rank)


@pytest.mark.slow("trains on ranks")
def test_loops_in_which_a_rank_overflows() -> None:
    on_each_rank(_in_turn)


def _on_four(rank: int) -> None:
    run = training(options={"level": "O2"})
    run.step()
    run.overflow([2])
    run.step()
    run.step()
    run.check(3e-4)


@pytest.mark.slow("trains on ranks")
def test_four_ranks_some_of_whose_shards_are_padded() -> None:
    on_each_rank(_on_four, ranks=4)


def _reduced_low(rank: int) -> None:
    """`MixedPrecisionPolicy(reduce_dtype=...)`: FSDP gets unscaled gradients, and rounds them."""
    for low, level, dtype, optimizing in (
        (torch.float16, "O1", torch.float16, sgd),
        (torch.float16, "O2", torch.float16, ours),
        (torch.bfloat16, "O1", torch.float16, ours),
        (torch.bfloat16, "O2", torch.float16, sgd),
        (torch.bfloat16, "O1", torch.bfloat16, sgd),
        (torch.bfloat16, "O2", torch.bfloat16, ours),
    ):
        run = training(
            options={"level": level, "dtype": dtype},
            settings={"mp_policy": MixedPrecisionPolicy(reduce_dtype=low)},
            optimizing=optimizing,
        )
        with reductions() as seen:
            run.step()
        assert set(seen) == {low}
        run.step()
        if dtype is torch.float16:
            run.overflow([0])
            run.overflow([1], gradient=True)
        run.step()
        run.check(4e-3 if torch.bfloat16 in (low, dtype) else 1e-3)


@contextmanager
def reductions() -> Iterator[list[torch.dtype]]:
    """The dtypes in which gradients are reduced meanwhile."""
    seen: list[torch.dtype] = []
    reduce = DefaultReduceScatter.__call__

    def spy(self: Any, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(output_tensor.dtype)
        return reduce(self, output_tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DefaultReduceScatter, "__call__", spy)
        yield seen


@pytest.mark.slow("trains on ranks")
def test_a_policy_of_fsdp_reduces_gradients_low() -> None:
    on_each_rank(_reduced_low)


class Tied(nn.Module):
    """An embedding whose matrix is that of the last layer too, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 12, bias=False)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.frozen(self.embed(x))) @ self.head.weight


def _settings_of_fsdp(rank: int) -> None:
    settings: list[dict[str, Any]] = [
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float32)},
        {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))},
    ]
    for options in settings:
        run = training(options={"level": "O2"}, settings=options)
        run.step()
        run.step()
        run.overflow([3])
        run.step()
        run.check()
    tied = Training(Tied, shard_root, options={"level": "O2"})
    tied.step()
    tied.step()
    tied.overflow([1])
    tied.step()
    tied.check()


@pytest.mark.slow("trains on ranks")
def test_settings_of_fully_shard_on_four_ranks() -> None:
    on_each_rank(_settings_of_fsdp, ranks=4)
