"""A function on several processes, the ranks of one process group that talks through gloo."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lanes import limit
from torch import multiprocessing

# A server imports these once, and runs nothing itself. Each rank is a fork of it, to save time.
multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "mpcompile"])

_groups: list[Any] = []
SECONDS = 0.8 * limit()  # of the time of a test


def join(rank: int, ranks: int, folder: str) -> None:
    """Be this rank of a group whose processes meet in `folder`, of which none waits forever."""
    store = dist.FileStore(f"{folder}/store", ranks)
    patience = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=patience)
    # Where its last reference goes in C++, right after it was used, a group can hang for good: see
    # `mpcompile.ranks.ddp.hold_group`.
    _groups.append(dist.group.WORLD)


def on_each_rank(function: Callable[..., None], *args: Any, ranks: int = 2) -> None:
    """Run `function(rank, *args)` in `ranks` processes of one thread; raise what one raises."""
    end = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory() as folder:
        # The server has the environment of its own start.
        processes = (dict(os.environ), function, folder, ranks, args)
        context = multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            _run, processes, nprocs=ranks, join=False, start_method="forkserver"
        )
        try:
            while not context.join(timeout=1):
                assert time.monotonic() < end, f"some of the ranks hang: {context.pids()}"
        finally:
            for process in context.processes:
                process.kill()


def _run(
    rank: int,
    environment: dict[str, str],
    function: Callable[..., None],
    folder: str,
    ranks: int,
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    join(rank, ranks, folder)
    function(rank, *args)
    dist.barrier()
    # Not through the interpreter's end: a thread of gloo's that lets go of a tensor while it is
    # being torn down aborts the process, now and then, and a group that a DDP module still holds
    # has its threads to the last (github.com/pytorch/pytorch/issues/190489; read in torch 2.13).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
