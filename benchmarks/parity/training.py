"""Every task trained in FP32 and in each mixed precision, from each seed."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time

import torch
from torch import nn

from mpcompile import loss_scale_of, mpcompile

from .tasks import Metrics, Task

__all__ = ["FP32", "MIXED", "Outcome", "train_all"]

FP32 = "FP32"
MIXED = {
    f"{short} {level}": (dtype, level)
    for short, dtype in (("FP16", torch.float16), ("BF16", torch.bfloat16))
    for level in ("O1", "O2")
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run. The last two are None without a loss scale."""

    metrics: Metrics
    loss_scale: float | None = None
    skipped_steps: int | None = None


def train_all(
    task: Task, seeds: range, emit: str, device: torch.device
) -> dict[str, list[Outcome]]:
    """One outcome for each seed, under "FP32" and the names of `MIXED`; tells its way on stderr."""
    outcomes: dict[str, list[Outcome]] = {arm: [] for arm in (FP32, *MIXED)}
    for arm, seed in itertools.product(outcomes, seeds):
        start = time.perf_counter()
        outcome = _train(task, arm, seed, emit, device)
        outcomes[arm].append(outcome)
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in outcome.metrics.items())
        spent = time.perf_counter() - start
        print(f"{task.name}, {arm}, seed {seed}: {metrics} ({spent:.0f} s)", file=sys.stderr)
    return outcomes


def _train(task: Task, arm: str, seed: int, emit: str, device: torch.device) -> Outcome:
    torch._dynamo.reset()  # each run compiles anew: no limit on recompilations is reached
    torch.manual_seed(seed)
    model = task.model().to(device)
    if arm in MIXED:
        dtype, level = MIXED[arm]
        mpcompile(model, dtype=dtype, level=level, emit=emit, strict=True)
    losses = _loop(task, model, seed)
    last = losses[-max(1, len(losses) // 10) :]
    metrics = {"last training loss": statistics.fmean(last), **task.judge(model)}
    if arm in MIXED and MIXED[arm][0] is torch.float16:
        scale = loss_scale_of(model)
        return Outcome(metrics, scale.value, scale.skipped_steps)
    return Outcome(metrics)


def _loop(task: Task, model: nn.Module, seed: int) -> list[float]:
    """The training loop of plain PyTorch, the same for FP32 and for mixed precision."""
    optimizer = task.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=task.peak, total_steps=task.steps + 1, cycle_momentum=False
    )
    losses = []
    for inputs, targets in task.batches(seed):
        loss = task.loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses
