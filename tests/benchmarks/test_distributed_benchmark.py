"""The benchmark that counts what a step sends: sizes that are known, and a tiny run of it all."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import on_each_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.__main__ import main
from benchmarks.distributed import ARMS, AUTOCAST, DDP, Arm, Collective, Counted, sent_in, verdicts

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def _known_sizes(rank: int) -> None:
    ranks = dist.get_world_size()
    others = (ranks - 1) / ranks
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    size = 6 * 8 + 8 + 8 * 4 + 4
    x = torch.randn(2, 6)
    ddp = DistributedDataParallel(net)
    for _ in range(2):  # buckets are made again in the second forward
        ddp(x).sum().backward()
    with sent_in(ranks) as sent:
        ddp(x).sum().backward()
    assert sent == [Collective("all-reduce", "FP32", 2 * others * 4 * size)]

    with sent_in(ranks) as sent, ddp.no_sync():
        ddp(x).sum().backward()
    assert sent == []

    sharded = fully_shard(nn.Linear(6, 8, bias=False))
    with sent_in(ranks) as sent:
        sharded(x).sum().backward()
    gathered = Collective("all-gather", "FP32", others * 4 * 6 * 8)
    assert sent == [gathered, Collective("reduce-scatter", "FP32", others * 4 * 6 * 8)]

    with sent_in(ranks) as sent:
        dist.all_reduce(torch.ones(3, dtype=torch.float16))
        dist.all_gather([torch.empty(5, dtype=torch.float64) for _ in range(ranks)],
                        torch.ones(5, dtype=torch.float64))  # fmt: skip
        dist.broadcast(torch.ones(7, dtype=torch.bfloat16), src=0)
        functional.all_reduce(torch.ones(9), "sum", dist.group.WORLD).sum()  # as DTensor does
        dist.barrier()
    assert sent == [
        Collective("all-reduce", "FP16", 2 * others * 2 * 3),
        Collective("all-gather", "FP64", others * 8 * 5 * ranks),
        Collective("broadcast", "BF16", 2 * 7),
        Collective("all-reduce", "FP32", 2 * others * 4 * 9),
        Collective("barrier", "", 0),
    ]

    with pytest.raises(RuntimeError, match="can't tell what was sent"):
        _send_what_is_not_known(ranks)


def _send_what_is_not_known(ranks: int) -> None:
    with sent_in(ranks):
        dist.reduce(torch.ones(2), dst=0)


@pytest.mark.slow("a benchmark's own test, which runs it small")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep("four ranks"))])
def test_what_is_sent_has_the_known_size(ranks: int) -> None:
    on_each_rank(_known_sizes, ranks=ranks)


def test_verdicts_hold_us_to_the_peer() -> None:
    def counted(*sizes: float) -> Counted:
        return Counted([Collective("all-reduce", "FP32", size) for size in sizes], start=0)

    found = {arm.name: counted(50.0, 50.0) for arm in ARMS}
    assert list(dict(verdicts(found)).values()) == [True] * 16
    found[Arm(DDP, "O1", clips=False).name] = counted(1.0, 1.0, 1.0)
    found[Arm(DDP, "O2", clips=False).name] = counted(100.2)
    assert list(dict(verdicts(found)).values()).count(False) == 2


@pytest.mark.sweep("runs a benchmark, small")
def test_distributed_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "distributed", "--quick", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "distributed_cpu.json").read_text())
    assert data["counted"].keys() == {arm.name for arm in ARMS}
    assert all(data["verdicts"].values()), data["verdicts"]
    assert AUTOCAST in capsys.readouterr().out
