"""A rank is killed in mid-run; torchrun starts all ranks again, and the run ends bit-equal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from repository import ROOT, SUPPORT
from trained_on_ranks import OVERFLOWS, WAYS, Way, leaves

pytestmark = [
    pytest.mark.slow("trains on ranks"),
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]


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
