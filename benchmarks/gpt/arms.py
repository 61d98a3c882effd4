"""What is compared: the arms, the sizes, and one model under one compiler."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.timing import low_dtype
from benchmarks.step_times.measure import AUTOCAST, FP32, O1, O2, OURS
from mpcompile import MPOptimizer, compiled_plans, mpcompile
from mpcompile.demo.model import GPT, GPTConfig
from mpcompile.demo.train import bytes_saved_for_backward

__all__ = [
    "ARMS",
    "AUTOCAST",
    "FP32",
    "HALF_ARMS",
    "HALF_AUTOCAST",
    "HALF_O2",
    "O1",
    "O2",
    "OURS",
    "RECOMPUTE",
    "STARTED",
    "TINY",
    "Trainee",
    "Work",
    "work_for",
]

RECOMPUTE = "mpcompile O2, recompute"
HALF_AUTOCAST, HALF_O2 = "compile + autocast FP16, GradScaler", "mpcompile O2 FP16, MPOptimizer"
OPTIONS: dict[str, dict[str, Any]] = {
    O1: {"level": "O1"},
    O2: {"level": "O2"},
    RECOMPUTE: {"level": "O2", "recompute": True},
    HALF_O2: {"level": "O2", "dtype": torch.float16},
}
ARMS = (FP32, AUTOCAST, O1, O2, RECOMPUTE)
HALF_ARMS = (HALF_AUTOCAST, HALF_O2)
STARTED = (FP32, AUTOCAST, O1, O2)


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured, and how often.

    Attributes:
        half: with the arms in FP16.
        warm_starts: of each arm; 0: no start at all is measured.
    """

    model: GPTConfig = GPTConfig(vocab=4099, context=128, width=256, layers=4, heads=4)
    batch: int = 8
    emit: str = "inductor"
    rounds: int = 40
    steps: int = 4
    warm_starts: int = 7
    half: bool = False

    @property
    def arms(self) -> tuple[str, ...]:
        return (*ARMS, *(HALF_ARMS if self.half else ()))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Who is compared with whom."""
        full = [(ours, base) for ours in (O1, O2, RECOMPUTE) for base in (AUTOCAST, FP32)]
        return [*full, *([(HALF_O2, HALF_AUTOCAST)] if self.half else [])]


CPU = Work()
# Wide enough that kernels, not their launches, take the time: 14 TFLOP a step.
CUDA = Work(
    model=GPTConfig(vocab=32003, context=1024, width=2048, layers=4, heads=16),
    rounds=15,
    warm_starts=1,
    half=True,
)
TINY = Work(
    model=GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2),
    batch=2,
    emit="eager",
    rounds=1,
    steps=1,
    warm_starts=0,
)


def work_for(device: torch.device) -> Work:
    """The full size on this type of device."""
    return CUDA if device.type == "cuda" else CPU


class Trainee:
    """One model under one compiler, ready to step on one fixed batch."""

    def __init__(self, name: str, work: Work, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = GPT(work.model).to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=True
        )
        size = (work.batch, work.model.context)
        tokens = [torch.randint(work.model.vocab, size).to(device) for _ in range(2)]
        self.idx, self.targets = tokens
        self.around: Callable[[], Any] = contextlib.nullcontext
        self.name, self.emit, self.device = name, work.emit, device
        # Off, it hands gradients and steps through.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == HALF_AUTOCAST)
        if name in (AUTOCAST, HALF_AUTOCAST):
            low = torch.bfloat16 if name == AUTOCAST else torch.float16
            self.around = lambda: torch.autocast(device.type, low)

    def compile(self) -> None:
        if self.name in OPTIONS:
            options = {"dtype": low_dtype(self.device), **OPTIONS[self.name]}
            if self.emit != "inductor":
                options["recompute"] = False
            mpcompile(self.model, emit=self.emit, strict=True, **options)
            if self.name == HALF_O2:
                self.optimizer = MPOptimizer(self.optimizer, emit=self.emit)
        else:
            self.model.compile(backend=self.emit)

    def loss(self) -> Tensor:
        with self.around():
            result: Tensor = self.model(self.idx, self.targets)
        return result

    def step(self) -> Tensor:
        """Forward and backward; nothing waits for the device."""
        self.optimizer.zero_grad()
        loss = self.loss()
        self.scaler.scale(loss).backward()
        return loss.detach()

    def step_with_update(self) -> None:
        """Forward, backward and AdamW."""
        self.step()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def runs_low(self) -> bool:
        """Whether anything does, after a first step of ours."""
        plans = compiled_plans(self.model)
        return any(node.precision == "LOW" for plan in plans for node in plan.nodes)

    def saved_bytes(self) -> int:
        with bytes_saved_for_backward(self.model) as saved:
            self.loss()
        return sum(saved.values())
