"""The trainings that are compared: an engine, and how its gradients become a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import GPT2, Sample
from mpcompile import MPOptimizer, mpcompile

__all__ = ["ARMS", "AUTOCAST", "DDP", "FSDP", "LOW_PEER", "OURS", "TINY", "WORK", "Arm", "Work"]

LOW = torch.float16
NORM = 1.0  # gradients are clipped to it
BUCKET = 1  # MB of DDP's buckets: the least that Dynamo's splits of a graph allow
DDP, FSDP = "DDP", "FSDP2"
AUTOCAST = "autocast + GradScaler"
LOW_PEER = {
    DDP: "autocast + GradScaler, fp16_compress_hook",
    FSDP: "MixedPrecisionPolicy(FP16, FP16) + GradScaler",
}
OURS = {
    f"{level}{how}": (level, bool(how)) for level in ("O1", "O2") for how in ("", ", MPOptimizer")
}

Step = Callable[[Sequence[Tensor]], None]


@dataclasses.dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        warm: steps before the ones that are counted; in them DDP makes its buckets and the loss
            scale is found.
        steps: counted; each must send the same.
    """

    model: Callable[[], nn.Module]
    sample: Sample
    warm: int = 3
    steps: int = 3


@dataclasses.dataclass(frozen=True)
class Arm:
    """One training. `start(model)` returns its step, which takes a batch."""

    engine: str
    way: str
    clips: bool

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.way}" + (", clipped" if self.clips else "")

    def start(self, work: Work) -> Step:
        """Make model and optimizer, the same on all ranks; return one step of training."""
        torch.manual_seed(0)
        model = work.model()
        return (_ours if self.way in OURS else _peer)(self, model)


def _distributed(arm: Arm, model: nn.Module) -> nn.Module:
    if arm.engine == DDP:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET)
        if arm.way == LOW_PEER[DDP]:
            wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped
    low = arm.way == LOW_PEER[FSDP]
    policy = MixedPrecisionPolicy(LOW, LOW) if low else MixedPrecisionPolicy()
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _peer(arm: Arm, model: nn.Module) -> Step:
    model = _distributed(arm, model)
    optimizer = _optimizer(model)
    scaler = torch.amp.GradScaler("cpu")
    autocasts = arm.way != LOW_PEER[FSDP]

    def step(batch: Sequence[Tensor]) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", LOW, enabled=autocasts):
            loss = model(*batch)
        scaler.scale(loss).backward()
        if arm.clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def _ours(arm: Arm, model: nn.Module) -> Step:
    level, generated = OURS[arm.way]
    model = mpcompile(
        _distributed(arm, model), level=level, dtype=LOW, emit="aot_eager", strict=True
    )
    optimizer = _optimizer(model)
    if generated:
        optimizer = MPOptimizer(optimizer, max_grad_norm=NORM if arm.clips else None, emit="eager")

    def step(batch: Sequence[Tensor]) -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        if arm.clips and not generated:
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()

    return step


ARMS = tuple(
    Arm(engine, way, clips)
    for engine in (DDP, FSDP)
    for clips in (False, True)
    for way in (AUTOCAST, LOW_PEER[engine], *OURS)
)

_gpt2 = functools.partial(GPT2, dropout=0.0, attention_dropout=0.0)
WORK = Work(
    functools.partial(_gpt2, vocab=1024, context=32, width=128, layers=4, heads=4),
    Sample((2, 32), (2, 32), 1024, 1024),
)
TINY = Work(
    functools.partial(_gpt2, vocab=64, context=8, width=32, layers=1, heads=2),
    Sample((2, 8), (2, 8), 64, 64),
)
