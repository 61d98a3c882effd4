"""Lightning on two processes that talk through gloo: DDP, and FSDP2."""

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_nets import FP16, FROM_LIGHTNING, Net, batches, distance, fitted, made
from ranks import on_each_rank

from mpcompile import compiled_plans, loss_scale_of
from mpcompile.integrations.lightning import MPCompilePrecision

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
    *[pytest.mark.filterwarnings(line) for line in FROM_LIGHTNING],
]

CLOSE = 2**-8


class Shared(Net):
    """Each rank takes its part of a batch."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        train = self.trainer
        return [part[train.global_rank :: train.world_size] for part in batch]


class Checked(Callback):
    """Fails in the processes of the training, where the module lives, unless all went well."""

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        plans = [plan for plan in compiled_plans(module) if plan.scaled]
        assert plans
        assert all(plan.left is None and plan.counts()["LOW"] > 0 for plan in plans)
        scale = loss_scale_of(module)
        assert scale.skipped_steps == 2
        mine = [torch.tensor([scale.value]), *(p.detach().flatten() for p in module.parameters())]
        both = [torch.empty(torch.cat(mine).shape) for _ in range(2)]
        dist.all_gather(both, torch.cat(mine))
        assert both[0].equal(both[1])


@pytest.mark.slow("ranks under Lightning")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="O1", marks=pytest.mark.sweep("the rest of a matrix, on ranks")),
        pytest.param({"level": "O2", "compile_optimizers": True}, id="O2, compiled optimizers"),
    ],
)
def test_two_ranks_follow_one_process(options: dict[str, Any]) -> None:
    """On the same batches, of which one has a sample that overflows, of the first rank."""

    def trained(**more: Any) -> Any:
        data = batches()
        data.dataset.tensors[0][16] *= 1e6
        plugins = [MPCompilePrecision(**FP16, **options)]
        return fitted(made(Shared), data, plugins=plugins, **more)

    one = trained()
    two = {"strategy": "ddp_spawn", "devices": 2, "use_distributed_sampler": False}
    assert distance(trained(callbacks=[Checked()], **two), one) < CLOSE
    assert distance(one, made()) > 4 * CLOSE


class Sharded(Shared):
    """Its parameters are sharded by FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net[0], mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def sharded(rank: int, losses: list[float]) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2"}
    os.environ |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    module = fitted(
        made(Sharded),
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        plugins=[MPCompilePrecision(**FP16)],
        devices=2,
        use_distributed_sampler=False,
    )
    mine = torch.tensor(module.losses)
    dist.all_reduce(mine)
    assert (mine / 2).tolist() == pytest.approx(losses, abs=0.01)
    assert any(plan.scaled and plan.counts()["LOW"] for plan in compiled_plans(module))


@pytest.mark.sweep("the rest of a matrix, on ranks")
def test_shards_follow_one_process() -> None:
    on_each_rank(sharded, fitted(made()).losses)
