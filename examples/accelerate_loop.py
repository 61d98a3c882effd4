"""Train a small classifier in a loop of Hugging Face Accelerate's, in FP32 or in mixed precision.

    python examples/accelerate_loop.py            # in mixed precision
    python examples/accelerate_loop.py --plain    # accelerate alone, in FP32

Random weights, made-up data, nothing is downloaded. It needs `pip install "mpcompile[accelerate]"`.
Several processes: `accelerate launch --num_processes=2 --cpu examples/accelerate_loop.py`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mpcompile.integrations.accelerate import MPCompileAccelerator

INPUTS, CLASSES, ROWS, EPOCHS = 24, 6, 1024, 3


def rows(count: int, seed: int) -> TensorDataset:
    """Points, and which of their coordinates is the largest."""
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def train(*, plain: bool, seed: int = 0, **options: Any) -> float:
    """Train, and return the loss on rows not trained on. `options` go to `mpcompile()`."""
    set_seed(seed)
    model = nn.Sequential(
        nn.Linear(INPUTS, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
        nn.Linear(64, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(rows(ROWS, 1), batch_size=32, shuffle=True)
    if plain:
        accelerator = Accelerator(gradient_accumulation_steps=2)
    else:  # the changed line
        accelerator = MPCompileAccelerator(
            gradient_accumulation_steps=2, mpcompile=options, compile_optimizers=True
        )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    x, y = (tensor.to(accelerator.device) for tensor in rows(512, 2).tensors)
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without mpcompile, in FP32")
    parser.add_argument("--level", default="O2", help="O1 or O2 (default)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    loss = train(plain=given.plain, seed=given.seed, level=given.level)
    print(f"loss on new rows: {loss:.4f}")


if __name__ == "__main__":
    main()
