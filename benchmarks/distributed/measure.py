"""Two processes that train every arm and count what they send."""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from .arms import Arm, Work
from .counting import Collective, sent_in

__all__ = ["RANKS", "Counted", "measure_all"]

RANKS = 2
_PATIENCE = timedelta(minutes=5)


@dataclasses.dataclass(frozen=True)
class Counted:
    """What one rank sends.

    Attributes:
        step: the collectives of one step, sorted: every counted step sent these.
        start: those of all steps before it, beyond what as many such steps send.
    """

    step: list[Collective]
    start: int

    @property
    def sent(self) -> float:
        """The bytes of one step."""
        return sum(one.bytes for one in self.step)


def measure_all(work: Work, arms: Sequence[Arm]) -> dict[str, Counted]:
    """Train every arm on two processes; arm -> what each of them sent.

    Raises:
        RuntimeError: the ranks, or the steps of an arm, did not send the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = (folder, work, tuple(arms))
        multiprocessing.spawn(_rank, processes, nprocs=RANKS)  # type: ignore[no-untyped-call]
        found = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(RANKS)]
    for name, counted in found[0].items():
        if any(other[name] != counted for other in found):
            raise RuntimeError(f"{name}: the ranks sent different collectives")
    first: dict[str, Counted] = found[0]
    return first


def _rank(rank: int, folder: str, work: Work, arms: Sequence[Arm]) -> None:
    torch.set_num_threads(1)
    # A device profile would leave products of this size in FP32.
    os.environ["MPCOMPILE_PROFILE"] = "none"
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store, timeout=_PATIENCE)
    found = {arm.name: _count(arm, work, rank) for arm in arms}
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()
    # Not through the interpreter's end, where gloo's threads may abort the process
    # (github.com/pytorch/pytorch/issues/190489; read in torch 2.13).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _count(arm: Arm, work: Work, rank: int) -> Counted:
    torch._dynamo.reset()
    train = arm.start(work)
    torch.manual_seed(1 + rank)  # each rank has batches of its own
    steps = []
    for _ in range(work.warm + work.steps):
        batch = work.sample.draw(torch.device("cpu"))
        with sent_in(RANKS) as sent:
            train(batch)
        steps.append(sorted(sent))  # those that run at the same time may begin in any order
    begun, (step, *others) = steps[: work.warm], steps[work.warm :]
    if any(other != step for other in others):
        raise RuntimeError(f"{arm.name}: steps sent different collectives: {step}, {others}")
    return Counted(step, sum(map(len, begun)) - work.warm * len(step))
