"""The arms: one training step, made ready in each way."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.timing import auto_or
from mpcompile import MPCompileWarning, MPOptimizer, mpcompile
from mpcompile.lower.tracing_settings import traced_with
from mpcompile.scaling import copies

from .tasks import DTYPES, Loss, Task

__all__ = ["ARMS", "EAGER", "OURS", "PEER", "PIECES", "PLAIN", "WARM_UP", "WHOLE", "Trainee"]

EAGER = "eager FP32, fused AdamW"
PEER = "compile + autocast + GradScaler + fused AdamW"
PLAIN = "torch.compile(train_step), FP32"
PIECES = ("pieces O1", "pieces O2")
WHOLE = ("whole O1", "whole O2")
OURS = (*PIECES, *WHOLE)
ARMS = (EAGER, PEER, PLAIN, *OURS)

WARM_UP = 3
"""Steps after which everything is compiled: the first in FP16 searches for the loss scale."""


def _as_it_is(value: Any) -> Any:
    return value


class _Scaled:
    """An optimizer as a GradScaler steps it."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.step = functools.partial(scaler.step, optimizer)
        self.zero_grad = optimizer.zero_grad


class Trainee:
    """The models of a task under one arm, ready to step on one fixed batch.

    Attributes:
        arm: its name.
        left: why a training step that is to be whole runs in pieces, or None.
    """

    def __init__(self, task: Task, arm: str, dtype: str, emit: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.models = [model.to(device) for model in task.build()]
        self._batch = [x.to(device) for x in task.draw()]
        self.arm, self._emit = arm, emit
        self._options: dict[str, Any] = {
            "dtype": auto_or(DTYPES[dtype], device), "level": arm[-2:], "emit": emit
        } if arm in OURS else {}  # fmt: skip
        adam = functools.partial(torch.optim.AdamW, lr=1e-4, fused=arm in (EAGER, PEER))
        self._optimizers = [adam(model.parameters()) for model in self.models]
        low: Callable[[Loss], Loss] = _as_it_is
        scaled: Callable[[Tensor], Tensor] = _as_it_is
        steppers: list[Any] = self._optimizers
        self._after: Callable[[], object] = lambda: None
        if arm == PEER:
            low = torch.autocast(device.type, DTYPES[dtype])
            scaler = torch.amp.GradScaler(device.type, enabled=dtype == "FP16")
            scaled, self._after = scaler.scale, scaler.update
            steppers = [_Scaled(optimizer, scaler) for optimizer in self._optimizers]
            for model in self.models:
                model.compile(backend=emit)
        elif arm in OURS:
            steppers = [MPOptimizer(optimizer, emit=_kernels(emit)) for optimizer in steppers]
            for model in self.models if arm in PIECES else ():
                mpcompile(model, **self._options)
        self._step = task.make(self.models, steppers, low, scaled)
        if arm == PLAIN:
            compiled = torch.compile(self._step, backend=emit)
            self._step = traced_with(compiled, trace_autograd_ops=True)
        elif arm in WHOLE:
            self._step = mpcompile(self._step, **self._options)

    def step(self) -> Tensor:
        """One step; returns its loss. Nothing waits for the device but a GradScaler."""
        loss = self._step(*self._batch)
        self._after()
        return loss

    def warm_up(self) -> list[float]:
        """Compile everything. Returns the losses."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MPCompileWarning)  # the report says what is not whole
            return [float(self.step()) for _ in range(WARM_UP)]

    def trains(self) -> bool:
        """Whether each parameter has been updated by an optimizer."""
        return all(
            optimizer.state.get(p)
            for model, optimizer in zip(self.models, self._optimizers, strict=True)
            for p in model.parameters()
        )

    @property
    def left(self) -> str | None:
        return self._step.left if self.arm in WHOLE else None  # type: ignore[attr-defined]

    def held_bytes(self) -> int:
        """Bytes that lie there between steps, but for the batch."""
        tensors = [t for m in self.models for t in (*m.parameters(), *m.buffers())]
        tensors += [
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        parameters = [p for model in self.models for p in model.parameters()]
        tensors += [c.stored for p in parameters for c in copies.copies_of(p).values()]
        tensors += [p.grad for p in parameters if p.grad is not None]
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
        return sum(storages.values())


def _kernels(emit: str) -> str:
    """What an MPOptimizer's `emit` can be."""
    return "inductor" if emit == "inductor" else "eager"
