"""Trains with mpcompile on a GPU that is emulated, op by op, and tells as JSON how far off it is.

python tests/support/emulated_training.py h100
"""

from benchmarks import emucuda  # isort: skip  (before torch)

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile

STEPS = 6
OVERFLOW = 4  # the step whose inputs are too large for FP16


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(STEPS, 32, 37, generator=generator)
    xs[OVERFLOW] *= 1e6
    return list(zip(xs, torch.randint(10, (STEPS, 32), generator=generator), strict=True))


def train(
    model: nn.Module, optimizer: Any, dtype: torch.dtype, *, steps: Sequence[int]
) -> list[float]:
    """The losses; on a GPU nothing may wait for it after two steps."""
    device = next(model.parameters()).device
    given = [(x.to(device, dtype), y.to(device)) for x, y in batches()]
    losses = []
    for step in steps:
        if device.type == "cuda" and step == 2:
            torch.cuda.set_sync_debug_mode("error")
        loss = F.cross_entropy(model(given[step][0]), given[step][1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return [loss.item() for loss in losses]


def compared(level: str) -> dict[str, Any]:
    """The overflow's step is skipped: in FP64 it is left out."""
    exact = net().double()
    start = torch.cat([p.detach().flatten() for p in exact.parameters()])
    sgd = torch.optim.SGD(exact.parameters(), lr=0.1, momentum=0.9)
    kept = [step for step in range(STEPS) if step != OVERFLOW]
    wanted = train(exact, sgd, torch.float64, steps=kept)
    scale = LossScale.dynamic(init_scale=2.0**10)
    model = mpcompile(
        net().cuda(), dtype=torch.float16, level=level, loss_scale=scale,
        emit="aot_eager", strict=True,
    )  # fmt: skip
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = MPOptimizer(sgd, emit="aot_eager", max_grad_norm=1e6)
    found = train(model, optimizer, torch.float32, steps=range(STEPS))
    mine, theirs = (
        torch.cat([p.detach().double().cpu().flatten() for p in m.parameters()]) - start
        for m in (model, exact)
    )
    return {
        "losses": [found[step] for step in kept], "exact": wanted,
        "moved": ((mine - theirs).norm() / theirs.norm()).item(),
        "skipped": optimizer.skipped_steps, "scale": loss_scale_of(model).value,
    }  # fmt: skip


if __name__ == "__main__":
    emucuda.become(sys.argv[1])
    print(json.dumps({level: compared(level) for level in ("O1", "O2")}))
