"""Lightning's DDP strategy, on two processes that talk through gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import Callback
from lightning_nets import FP16, FROM_LIGHTNING, Net, batches, distance, fitted, made

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


@pytest.mark.parametrize(
    "options",
    [{}, {"level": "O2", "compile_optimizers": True}],
    ids=["O1", "O2, compiled optimizers"],
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
