"""The first thing to try on a device: compile at O1 and O2, and one step against FP64.

    python -m benchmarks.gpu.smoke

The optimizer is SGD at a rate of 1: how far it moves a parameter is its gradient, whatever dtype
and scale that has in between.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile import MPOptimizer, compiled_plans, mpcompile

LIMIT = {torch.float16: 0.01, torch.bfloat16: 0.05}
"""Of the error of all updates together, relative to FP64's: a few roundings of the dtype."""

Batch = tuple[Tensor, Tensor]


def run(device: str, *, emit: str = "inductor", numbers: bool = True) -> int:
    """Try every level in every dtype; print a line each. 0: all are as they should be.

    Args:
        numbers: False where values don't exist, on a GPU by name.
    """
    failed = [
        f"{dtype} {level}"
        for dtype in LIMIT
        for level in ("O1", "O2")
        if not _try(device, dtype, level, emit, numbers)
    ]
    print(f"failed: {', '.join(failed)}" if failed else "every level in every dtype: as expected")
    return 1 if failed else 0


def _try(device: str, dtype: torch.dtype, level: str, emit: str, numbers: bool) -> bool:
    model, batch = _model_and_batch(device)
    mpcompile(model, dtype=dtype, level=level, emit=emit, strict=True)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), emit=emit)
    start = time.perf_counter()
    loss, update = _step(model, optimizer, batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    spent = time.perf_counter() - start
    (plan,) = compiled_plans(model)
    told = f"{dtype} {level}: one graph for {plan.device}, first step {spent:.1f} s"
    right = f"torch.{plan.dtype}" == str(dtype) and loss.dtype is torch.float32
    if not numbers:
        print(told)
        return right and loss.device.type == device
    reference, (x, y) = _model_and_batch(device)
    reference.double()
    plain = torch.optim.SGD(reference.parameters(), lr=1.0)
    true_loss, true_update = _step(reference, plain, (x.double(), y))
    error = float((update.double() - true_update).norm() / true_update.norm())
    off = abs(float(loss) / float(true_loss) - 1)
    print(f"{told}; loss off by {off:.1e}, update by {error:.1e}")
    return right and error < LIMIT[dtype] and off < LIMIT[dtype]


def _model_and_batch(device: str) -> tuple[nn.Module, Batch]:
    """A small classifier and (x (64, 256), classes (64,)), the same at each call."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU(),
            nn.Linear(512, 10),
        )  # fmt: skip
        return model, (torch.randn(64, 256), torch.randint(10, (64,)))


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> tuple[Tensor, Tensor]:
    """The loss, and how far the step moved all parameters, as one vector."""
    before = [p.detach().clone() for p in model.parameters()]
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    moved = [(p.detach() - q).flatten() for p, q in zip(model.parameters(), before, strict=True)]
    return loss.detach(), torch.cat(moved)


if __name__ == "__main__":
    sys.exit(run("cuda"))
