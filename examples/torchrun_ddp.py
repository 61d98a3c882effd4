"""Train a small classifier on several processes with DistributedDataParallel.

    torchrun --nproc-per-node=2 examples/torchrun_ddp.py            # in mixed precision
    torchrun --nproc-per-node=2 examples/torchrun_ddp.py --plain    # PyTorch alone, in FP32

Made-up data, nothing is downloaded. On a CPU the processes talk through gloo, on GPUs through NCCL.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mpcompile import MPOptimizer, mpcompile

INPUTS, CLASSES, ROWS, EPOCHS = 24, 6, 1024, 3


def rows(count: int, seed: int) -> TensorDataset:
    """Points, and which of their first coordinates is the largest."""
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def train(device: torch.device, *, plain: bool, **options: Any) -> float:
    """Train, and return the loss on rows not trained on. `options` go to `mpcompile()`."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(INPUTS, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, CLASSES)
    ).to(device)
    model = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if not plain:
        model = mpcompile(model, level="O2", **options)
        optimizer = MPOptimizer(optimizer, max_grad_norm=1.0, emit=options.get("emit", "inductor"))
    data = rows(ROWS, seed=1)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=16, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            if plain:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    x, y = (t.to(device) for t in rows(256, seed=3).tensors)
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without mpcompile")
    plain = parser.parse_args().plain
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()  # gloo for tensors on CPUs, NCCL for those on GPUs
    loss = train(device, plain=plain)
    if dist.get_rank() == 0:
        print(f"loss on rows not trained on: {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
