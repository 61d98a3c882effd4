"""The examples for several processes: with the changed lines they end where PyTorch alone does."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_rank

from examples import torchrun_ddp, torchrun_fsdp

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.slow("trains on ranks"),
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]


def _ddp(rank: int) -> None:
    train = torchrun_ddp.train
    plain = train(CPU, plain=True)
    assert plain < 0.8  # of log(6) = 1.79, where it begins
    assert abs(train(CPU, plain=False, emit="eager", strict=True) - plain) < 0.02 * plain


def _fsdp(rank: int, folder: Path) -> None:
    train = torchrun_fsdp.train
    plain = train(CPU, plain=True)
    assert plain < 3.0  # of log(32) = 3.47, where it begins
    options = {"emit": "eager", "strict": True, "checkpoint": folder / "saved"}
    found = train(CPU, plain=False, **options)
    assert abs(found - plain) < 0.02 * plain
    torch._dynamo.reset()
    assert train(CPU, plain=False, **options) < found - 0.2  # it goes on, and has learnt more


def test_ddp() -> None:
    on_each_rank(_ddp)


def test_fsdp(tmp_path: Path) -> None:
    on_each_rank(_fsdp, tmp_path)
