"""Train a small GPT on several processes with FSDP2, save it, and go on from what was saved.

    torchrun --nproc-per-node=2 examples/torchrun_fsdp.py                     # mixed precision
    torchrun --nproc-per-node=2 examples/torchrun_fsdp.py --plain             # FP32
    torchrun --nproc-per-node=2 examples/torchrun_fsdp.py --checkpoint model  # saves, or goes on

Made-up data, nothing is downloaded. The checkpoint may be loaded by another number of processes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from mpcompile import MPOptimizer, loss_scale_of, mpcompile
from mpcompile.demo import GPT, GPTConfig

CONFIG = GPTConfig(vocab=32, context=16, width=64, layers=2, heads=2)
STEPS, BATCH = 40, 8


def batch(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of tokens, each a fixed distance after the one before, and the tokens that follow."""
    generator = torch.Generator().manual_seed(seed)
    first, distance = torch.randint(CONFIG.vocab, (2, BATCH, 1), generator=generator)
    ids = (first + (1 + distance % 3) * torch.arange(CONFIG.context + 1)) % CONFIG.vocab
    return ids[:, :-1].to(device), ids[:, 1:].to(device)


def train(
    device: torch.device, *, plain: bool, checkpoint: Path | None = None, **options: Any
) -> float:
    """Train, and return the mean loss of the last 10 steps. `options` go to `mpcompile()`."""
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if not plain:
        model = mpcompile(model, level="O2", **options)
        optimizer = MPOptimizer(optimizer, max_grad_norm=1.0, emit=options.get("emit", "inductor"))

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        kept = {"model": weights, "optimizer": moments}
        return kept if plain else {**kept, "scale": loss_scale_of(model)}

    if checkpoint is not None and (checkpoint / ".metadata").exists():
        loaded = state()
        dcp.load(loaded, checkpoint_id=checkpoint)
        set_state_dict(
            model, optimizer,
            model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"],
        )  # fmt: skip
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step * dist.get_world_size() + dist.get_rank(), device))
        loss.backward()
        if plain:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    if checkpoint is not None:
        dcp.save(state(), checkpoint_id=checkpoint)
    last = torch.stack(losses[-10:]).mean()
    dist.all_reduce(last, dist.ReduceOp.SUM)
    return float(last) / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without mpcompile")
    parser.add_argument("--checkpoint", type=Path, help="a folder")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()  # gloo for tensors on CPUs, NCCL for those on GPUs
    loss = train(device, plain=options.plain, checkpoint=options.checkpoint)
    if dist.get_rank() == 0:
        print(f"mean loss of the last steps: {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
