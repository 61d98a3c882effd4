"""ZeRO-1: `ZeroRedundancyOptimizer` with and without MPOptimizer, under DDP, on two processes."""

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import OVERFLOW, Training, check_same, flat
from low_gradients import Net
from ranks import on_each_rank
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from mpcompile import LossScale, MPOptimizer
from mpcompile.errors import MPCompileError
from mpcompile.scaling.copies import copies_of

with warnings.catch_warnings():  # it uses a part of torch that is deprecated
    warnings.simplefilter("ignore")
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
}


def zero(parameters: Iterable[torch.Tensor], kind: str, **options: Any) -> ZeroRedundancyOptimizer:
    cls, settings = CLASSES[kind]
    return ZeroRedundancyOptimizer(parameters, optimizer_class=cls, **settings, **options)


OVERFLOWS = 2  # the step in which a backward overflows on one rank


def train(
    kind: str, *, level: str | None, generated: bool = True, norm: float | None = None,
    emit: str = "eager", set_to_none: bool = True, **of_zero: Any,
) -> nn.Module:  # fmt: skip
    """Some steps, in FP16 or (without a level) plain; one backward overflows on one rank. Returns
    the model.
    """
    cls, settings = CLASSES[kind]
    scale = LossScale.dynamic(init_scale=2.0**10)

    def optimizing(net: nn.Module) -> torch.optim.Optimizer:
        optimizer = zero(net.parameters(), kind, **of_zero)
        if not generated:
            return optimizer
        return MPOptimizer(optimizer, max_grad_norm=norm, emit=emit, loss_scale=scale)

    run = Training(
        options={"level": level, "loss_scale": "dynamic" if generated else scale},
        order="optimizer, engine" if level is None else "optimizer, mpcompile, engine",
        optimizing=optimizing, plainly=lambda twin: cls(twin.parameters(), **settings),
        scales=[scale], set_to_none=set_to_none,
    )  # fmt: skip

    def clip(model: nn.Module) -> None:
        if norm is not None and model is run.twin:
            wanted = nn.utils.clip_grad_norm_(model.parameters(), norm).float()
            torch.testing.assert_close(run.optimizer.grad_norm, wanted, rtol=1e-2, atol=0)

    for step in range(5):
        if step == OVERFLOWS:
            run.overflow([0], factor=torch.inf if level is None else OVERFLOW)
        else:
            run.step(clip)
    run.check(1e-5 if level is None else 1e-2)
    # Each rank holds the state of its own partition alone.
    optimizer = run.optimizer.inner if generated else run.optimizer
    own = {id(p) for g in optimizer.optim.param_groups for p in g["params"]}
    assert 0 < len(own) < len(list(run.model.parameters()))
    assert {id(p) for p in optimizer.optim.state} == own
    run.model.eval()  # the next forward brings copies up to date
    run.model(torch.ones(2, 8))
    for p in run.model.parameters():
        for known in copies_of(p).values():
            assert torch.equal(known.tensor, p.to(known.tensor.dtype))
    return run.model


def _compiled_steps(rank: int) -> None:
    for kind in CLASSES:
        for norm in (None, 0.1):
            train(kind, level=None, norm=norm)
    for views in (False, True):
        for level in ("O1", "O2"):
            model = train("adamw", level=level, norm=0.1, parameters_as_bucket_view=views)
            assert any(copies_of(p) for p in model.parameters())
    checkpoint(rank)


@pytest.mark.slow("trains on ranks")
def test_two_ranks_follow_one_process() -> None:
    on_each_rank(_compiled_steps)


def _plain_steps(rank: int) -> None:
    """Torch calls step hooks for ZeRO and for the optimizer inside of it: both must skip once."""
    for clears in (True, False):
        for views in (False, True):
            train("adamw", level="O1", generated=False, set_to_none=clears,
                  parameters_as_bucket_view=views)  # fmt: skip


@pytest.mark.slow("trains on ranks")
def test_plain_zero_skips_once() -> None:
    on_each_rank(_plain_steps)


def _inductor(rank: int) -> None:
    train("adamw", level=None, norm=0.1, emit="inductor")


@pytest.mark.sweep("Inductor on each rank")
def test_inductor() -> None:
    on_each_rank(_inductor)


def checkpoint(rank: int) -> None:
    """State is collected, and loaded into either kind; settings of groups reach the step."""

    def made(compiled: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = Net()
        optimizer: Any = zero(net.parameters(), "adamw")
        return net, MPOptimizer(optimizer, emit="eager") if compiled else optimizer

    def go_on(net: nn.Module, optimizer: Any, seed: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (seed + 1)
        for p in net.parameters():  # all ranks have the same gradients, as after a reduction
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        return flat(net)

    net, optimizer = made(compiled=True)
    for seed in range(2):
        go_on(net, optimizer, seed)
    check_same(net)
    optimizer.consolidate_state_dict(to=0)
    # On a CPU the state of rank 0 itself isn't copied.
    messages: list[Any] = [copy.deepcopy(optimizer.state_dict()) if rank == 0 else None]
    dist.broadcast_object_list(messages)
    weights = copy.deepcopy(net.state_dict())
    wanted = go_on(net, optimizer, 2)
    for compiled in (True, False):
        other, resumed = made(compiled)
        other.load_state_dict(weights)
        saved = copy.deepcopy(messages[0])
        if not compiled:
            del saved["loss_scale"]
        resumed.load_state_dict(saved)
        torch.testing.assert_close(go_on(other, resumed, 2), wanted, rtol=1e-5, atol=1e-7)


def test_wrappers_of_optimizers(group: None) -> None:
    overlapping = zero(Net().parameters(), "adamw", overlap_with_ddp=True)
    with pytest.raises(MPCompileError, match="use overlap_with_ddp=False"):
        MPOptimizer(overlapping)
    averaging = PostLocalSGDOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1), Averager())
    with pytest.raises(MPCompileError, match=r"MPOptimizer\(SGD\(...\)\), and give it to Post"):
        MPOptimizer(averaging)
    net = Net()
    inside = PostLocalSGDOptimizer(
        MPOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), emit="eager"), Averager()
    )
    before = flat(net)
    net(torch.ones(2, 8)).sum().backward()
    wanted = before - 0.1 * torch.cat([p.grad.flatten() for p in net.parameters()])  # type: ignore[union-attr]
    inside.step()
    torch.testing.assert_close(flat(net), wanted)


class Averager:
    step = 0

    def average_parameters(self, params: Any) -> None:
        """All ranks are one."""


def test_a_step_sends_nothing_but_the_partitions(group: None) -> None:
    """The gradients are the same on all ranks, and so is what is found in them."""
    net = Net()
    optimizer = MPOptimizer(zero(net.parameters(), "adamw"), max_grad_norm=1.0, emit="eager")
    net(torch.ones(2, 8)).sum().backward()
    with CommDebugMode() as sent:
        optimizer.step()
    counts = {str(op): n for op, n in sent.get_comm_counts().items() if n}
    assert counts == {"c10d.broadcast_": len(list(net.parameters()))}
