"""Ranks stay alike, and a distributed checkpoint holds what each of them has."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_training import check_same
from ranks import on_each_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trained_on_ranks import WAYS, Training, leaves, network

from mpcompile import LossScale, MPCompileError, loss_scale_of, mpcompile
from mpcompile.compiler import backend
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
    real = backend.plan_graph

    def planted(*args: Any) -> Any:
        raise CannotRewrite("planted")

    from torch.distributed.fsdp import fully_shard

    for level in ("O1", "O2"):
        for sharded in (False, True):
            net = mlp()
            model: nn.Module = fully_shard(net) if sharded else DistributedDataParallel(net)
            mpcompile(model, level=level, **FP16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            backend.plan_graph = planted if rank == 0 else real
            try:
                with pytest.warns() if rank == 0 else pytest.MonkeyPatch.context():
                    out = model(torch.randn(4, 8))
                out.mean().backward()
                with pytest.raises(MPCompileError, match="left a graph in FP32"):
                    optimizer.step()
            finally:
                backend.plan_graph = real


def _all(rank: int) -> None:
    _a_forward_of_one_rank(rank)
    _join_is_refused(rank)
    _a_scale_that_comes_late(rank)
    _a_sparse_gradient(rank)
    _a_graph_left_on_one_rank(rank)


def test_ranks_stay_alike() -> None:
    on_each_rank(_all)


# -- checkpoints -----------------------------------------------------------------------------------


SAVED, STEPS = 3, 5


def save(rank: int, folder: Path, names: list[str]) -> None:
    """Train, save, and train on."""
    for name in names:
        torch._dynamo.reset()
        training = Training(WAYS[name])
        training.train(0, SAVED)
        scale = training.scale.state_dict()
        training.save(folder / name)
        assert training.scale.state_dict() == scale  # saving counts as no step
        saved = training.whole()
        training.train(SAVED, STEPS)
        end = training.whole()
        if rank == 0:
            torch.save({"saved": saved, "end": end}, folder / f"{name}.pt")


def load(rank: int, folder: Path, names: list[str]) -> None:
    """Go on from what was saved; the other number of ranks rounds the averages otherwise."""
    for name in names:
        torch._dynamo.reset()
        expected = torch.load(folder / f"{name}.pt", weights_only=True)
        training = Training(WAYS[name], seed=1)  # other weights than those that were saved
        training.load(folder / name)
        assert leaves(training.whole()) == leaves(expected["saved"]), name
        training.train(SAVED, STEPS)
        found = training.whole()
        assert found["scale"] == expected["end"]["scale"], name
        moved, off = 0.0, 0.0
        for key, end in expected["end"]["model"].items():
            moved += float((end - expected["saved"]["model"][key]).square().sum())
            off += float((end - found["model"][key]).square().sum())
        assert off < 1e-2**2 * moved, (name, off, moved)


def load_elsewhere(rank: int, folder: Path) -> None:
    """What either engine has saved goes into the other."""
    for name, other in (("DDP-O2-MPOptimizer", "FSDP2-O1"), ("FSDP2-O2-MPOptimizer", "DDP-O1")):
        torch._dynamo.reset()
        expected = torch.load(folder / f"{name}.pt", weights_only=True)["saved"]
        training = Training(WAYS[other], seed=1)
        training.load(folder / name)
        found = training.whole()
        for part in ("model", "scale"):
            assert leaves(found[part]) == leaves(expected[part]), name
        assert leaves(found["optimizer"]["state"]) == leaves(expected["optimizer"]["state"]), name


@pytest.mark.slow("trains on ranks")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 1),
        pytest.param(2, 4, marks=pytest.mark.sweep("four ranks")),
        pytest.param(4, 2, marks=pytest.mark.sweep("four ranks")),
    ],
)
def test_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    on_each_rank(save, tmp_path, list(WAYS), ranks=before)
    check_dtypes(tmp_path)
    on_each_rank(load, tmp_path, list(WAYS), ranks=after)
    if before != 4:
        on_each_rank(load_elsewhere, tmp_path, ranks=2)


def check_dtypes(folder: Path) -> None:
    """All numbers of model and optimizer are in FP32, in a file that names the plain parameters."""
    plain = {f"model.{name}" for name, _ in network().named_parameters()}
    for name in WAYS:
        items = dcp.FileSystemReader(folder / name).read_metadata().state_dict_metadata
        tensors = {key: item for key, item in items.items() if hasattr(item, "properties")}
        assert {item.properties.dtype for item in tensors.values()} == {torch.float32}, name
        assert {key for key in tensors if key.startswith("model.")} == plain, name
        assert {"scale.scale", "scale.good_steps", "scale.skipped_steps"} <= items.keys(), name
