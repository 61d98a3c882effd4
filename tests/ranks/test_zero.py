"""ZeRO-1: `ZeroRedundancyOptimizer` with and without MPOptimizer, under DDP, on two processes."""

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import check_same, flat
from low_gradients import Net
from ranks import on_each_rank
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from mpcompile import LossScale, MPOptimizer, mpcompile
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


OVERFLOW = 2


class Training:
    """Steps beside a plain FP32 model that sees the data of all ranks; one backward overflows on
    one rank.

    Args:
        level: of mpcompile in FP16, or None: the plain model.
        clears: whether gradients are set to None between steps, else to zeros.
    """

    def __init__(
        self,
        kind: str,
        *,
        level: str | None,
        compiled_step: bool,
        norm: float | None = None,
        clears: bool = True,
        emit: str = "eager",
        **of_zero: Any,
    ) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.reference = copy.deepcopy(self.net)
        self.scale = LossScale.dynamic(init_scale=2.0**10)
        self.optimizer: Any = zero(self.net.parameters(), kind, **of_zero)
        if compiled_step:
            self.optimizer = MPOptimizer(
                self.optimizer, max_grad_norm=norm, emit=emit, loss_scale=self.scale
            )
        if level is not None:
            scale = self.scale if not compiled_step else "dynamic"
            mpcompile(self.net, level=level, dtype=torch.float16, emit="eager", strict=True,
                      loss_scale=scale)  # fmt: skip
        self.model = DistributedDataParallel(self.net)
        cls, settings = CLASSES[kind]
        self.plain: Any = cls(self.reference.parameters(), **settings)
        self.compiled_step, self.level, self.norm = compiled_step, level, norm
        self.clears = clears

    def run(self, rank: int, steps: int = 5) -> None:
        data = torch.randn(steps, 2, 4, 8, generator=torch.Generator().manual_seed(1))
        for step, xs in enumerate(data):
            before = flat(self.net)
            self.optimizer.zero_grad(set_to_none=self.clears)
            factor = 1e30 if step == OVERFLOW and rank == 0 else 1.0
            factor = torch.inf if self.level is None and factor > 1 else factor
            (self.model(xs[rank]).square().mean() * factor).backward()
            self.optimizer.step()
            if step == OVERFLOW:
                assert torch.equal(flat(self.net), before)
                continue
            assert not torch.equal(flat(self.net), before), step
            self.plain.zero_grad()
            sum(self.reference(x).square().mean() for x in xs).div(2).backward()  # type: ignore[union-attr]
            if self.norm is not None:
                wanted = nn.utils.clip_grad_norm_(self.reference.parameters(), self.norm)
                torch.testing.assert_close(self.optimizer.grad_norm, wanted, rtol=1e-2, atol=0)
            self.plain.step()
        self.check()

    def check(self) -> None:
        """The training followed, all ranks are alike, one step was skipped."""
        assert (self.scale.value, self.scale.skipped_steps) == (2.0**9, 1)
        mine, wanted = flat(self.net), flat(self.reference)
        check_same(self.net)
        assert (mine - wanted).norm() <= (1e-5 if self.level is None else 1e-2) * wanted.norm()
        # Each rank holds the state of its own partition alone.
        own = {id(p) for g in self.zero.optim.param_groups for p in g["params"]}
        assert 0 < len(own) < len(list(self.net.parameters()))
        assert {id(p) for p in self.zero.optim.state} == own
        self.net.eval()  # the next forward brings copies up to date
        self.model(torch.ones(2, 8))
        for p in self.net.parameters():
            for known in copies_of(p).values():
                assert torch.equal(known.tensor, p.to(known.tensor.dtype))

    @property
    def zero(self) -> Any:
        return self.optimizer.inner if self.compiled_step else self.optimizer


def _compiled_steps(rank: int) -> None:
    for kind in CLASSES:
        for norm in (None, 0.1):
            Training(kind, level=None, compiled_step=True, norm=norm).run(rank)
    for views in (False, True):
        for level in ("O1", "O2"):
            training = Training("adamw", level=level, compiled_step=True, norm=0.1,
                                parameters_as_bucket_view=views)  # fmt: skip
            training.run(rank)
            assert bool(copies_of(training.net.fc1.weight)) == (level == "O2")
    checkpoint(rank)


@pytest.mark.slow("trains on ranks")
def test_two_ranks_follow_one_process() -> None:
    on_each_rank(_compiled_steps)


def _plain_steps(rank: int) -> None:
    """Torch calls step hooks for ZeRO and for the optimizer inside of it: both must skip once."""
    for clears in (True, False):
        for views in (False, True):
            Training("adamw", level="O1", compiled_step=False, clears=clears,
                     parameters_as_bucket_view=views).run(rank)  # fmt: skip


@pytest.mark.slow("trains on ranks")
def test_plain_zero_skips_once() -> None:
    on_each_rank(_plain_steps)


def _inductor(rank: int) -> None:
    Training("adamw", level=None, compiled_step=True, norm=0.1, emit="inductor").run(rank)


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
