"""A training that `tests/ranks/test_torchrun_examples.py` kills, and that goes on.

    torchrun ... tests/support/elastic_program.py FOLDER WAY

A checkpoint is saved every two steps. At the start the last complete one is loaded. The last rank
kills itself in the middle of a step, once. At the end each rank trains the same without a pause and
without a checkpoint, and leaves both ends in FOLDER.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from trained_on_ranks import WAYS, Training

STEPS, EVERY = 7, 2
KILLED = 5  # one step after a checkpoint


def checkpoints(folder: Path) -> list[int]:
    """The steps before which a checkpoint was saved completely (DCP writes its metadata last)."""
    return sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))


class Mortal(Training):
    dies = False

    def before_backward(self) -> None:
        if self.dies:  # while the others are in the backward's collectives, or on their way there
            os.kill(os.getpid(), signal.SIGKILL)


def train(training: Mortal, folder: Path) -> int:
    """Train to the end, from the last checkpoint if there is one; returns where it began."""
    start = max(checkpoints(folder), default=0)
    if start:
        training.load(folder / str(start))
    for step in range(start, STEPS):
        if step % EVERY == 0 and step > start:
            training.save(folder / str(step))
        last = dist.get_rank() == dist.get_world_size() - 1
        died = folder / "died"
        if step == KILLED and last and not died.exists():
            died.touch()
            training.dies = True
        training.train(step, step + 1)
    return start


def main(folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    resumed = Mortal(WAYS[name])
    start = train(resumed, folder)
    end = resumed.whole()
    torch._dynamo.reset()
    straight = Training(WAYS[name])
    straight.train(0, STEPS)
    found = {"start": start, "resumed": end, "straight": straight.whole()}
    torch.save(found, folder / f"end_{dist.get_rank()}.pt")
    dist.barrier()
    os._exit(0)  # as in tests/support/ranks.py


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
