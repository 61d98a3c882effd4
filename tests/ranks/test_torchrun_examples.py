"""Under torchrun: the examples for several processes end, with the changed lines, where PyTorch
alone does; and where a rank is killed in mid-run and all start again, the run ends bit-equal.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_rank
from repository import ROOT, SUPPORT
from trained_on_ranks import OVERFLOWS, WAYS, Way, leaves

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


def torchrun(*arguments: str, restarts: int) -> None:
    """Two ranks of a program, which torchrun's elastic agent may start again."""
    path = os.pathsep.join([str(SUPPORT), str(ROOT)])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MPCOMPILE_PROFILE": "none"}
    # A store of its own for each start. In the one that torchrun shares between them, gloo may find
    # the addresses of the ranks that were killed (torch 2.13, dynamic_rendezvous.py).
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*agent, f"--max-restarts={restarts}", "--monitor-interval=0.1", *arguments],
        env={**os.environ, **variables}, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


SLOW = pytest.mark.sweep("ranks that die and start again, for each way")
CASES = [
    pytest.param(way, id=name, marks=() if name == "DDP-O2-MPOptimizer" else SLOW)
    for name, way in WAYS.items()
]


@pytest.mark.parametrize("way", CASES)
def test_a_killed_rank(way: Way, tmp_path: Path) -> None:
    torchrun(str(SUPPORT / "elastic_program.py"), str(tmp_path), str(way), restarts=2)
    assert (tmp_path / "died").exists()
    for rank in range(2):
        found = torch.load(tmp_path / f"end_{rank}.pt", weights_only=True)
        assert found["start"] == 4  # the last checkpoint before it was killed
        assert leaves(found["resumed"]) == leaves(found["straight"])
        scale = found["straight"]["scale"]
        # Halved by the overflow in step 1; doubled after steps 2 to 4, and not yet after 5 and 6.
        assert (scale["scale"], scale["skipped_steps"], scale["good_steps"]) == (1024.0, 1, 2)
        assert OVERFLOWS == 1
