"""What one rank does by itself doesn't let ranks drift apart, nor wait for each other for ever."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import check_same
from ranks import on_each_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpcompile import LossScale, MPCompileError, backend, loss_scale_of, mpcompile
from mpcompile.errors import CannotRewrite

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

FP16: dict[str, Any] = {"dtype": torch.float16, "emit": "eager"}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def _a_forward_of_one_rank(rank: int) -> None:
    """Between the steps of two optimizers one rank runs the model, to log something."""
    scale = LossScale.dynamic(2.0**4, growth_interval=2)
    net = mlp()
    model = DistributedDataParallel(mpcompile(net, level="O2", loss_scale=scale, **FP16))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (net[0], net[2])]
    for _ in range(5):
        model(torch.randn(4, 8)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            if rank == 0:
                net(torch.randn(4, 8))
        net.zero_grad()
        check_same(scale.value, net[0])
    assert scale.value == 2.0**6  # it has doubled after the second and the fourth step


def _join_is_refused(rank: int) -> None:
    model = DistributedDataParallel(mpcompile(mlp(), **FP16))
    with pytest.raises(MPCompileError, match=r"join\(\).*drop_last"), model.join():
        model(torch.randn(4, 8))


class Late(nn.Module):
    """The second part, with a loss scale of its own, is used after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (mpcompile(nn.Linear(8, 8), level="O2", **FP16) for _ in "ab")

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        return self.second(y) if both else y


def _a_scale_that_comes_late(rank: int) -> None:
    torch.manual_seed(0)
    net = Late()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(4):
        # What fits one rank's gradients doesn't fit the other's: their searches differ.
        loss = model(torch.randn(4, 8), step > 1).mean() * (1.0 if rank else 1e3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        check_same(loss_scale_of(net.first).value, net.second)
    check_same(loss_scale_of(net.second).value)


def _a_sparse_gradient(rank: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8))
    model = DistributedDataParallel(mpcompile(net, level="O2", **FP16))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(2 * step + rank)
        model(torch.randint(16, (4,))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        check_same(net)


def _a_graph_left_on_one_rank(rank: int) -> None:
    real = backend._compile

    def planted(*args: Any) -> Any:
        raise CannotRewrite("planted")

    from torch.distributed.fsdp import fully_shard

    for level in ("O1", "O2"):
        for sharded in (False, True):
            net = mlp()
            model: nn.Module = fully_shard(net) if sharded else DistributedDataParallel(net)
            mpcompile(model, level=level, **FP16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            backend._compile = planted if rank == 0 else real
            try:
                with pytest.warns() if rank == 0 else pytest.MonkeyPatch.context():
                    out = model(torch.randn(4, 8))
                out.mean().backward()
                with pytest.raises(MPCompileError, match="left in FP32"):
                    optimizer.step()
            finally:
                backend._compile = real


def _all(rank: int) -> None:
    _a_forward_of_one_rank(rank)
    _join_is_refused(rank)
    _a_scale_that_comes_late(rank)
    _a_sparse_gradient(rank)
    _a_graph_left_on_one_rank(rank)


def test_ranks_stay_alike() -> None:
    on_each_rank(_all)
