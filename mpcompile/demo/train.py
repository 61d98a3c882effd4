"""One model in training, with its times and its memory; the demo runs two of these.

`Trainee.step` is the training loop a user would write in plain PyTorch: nothing in it depends on
whether the model was compiled for mixed precision.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from ..devices.capabilities import Capabilities
from ..devices.registry import capabilities
from .gpt import GPT

WARM_UP = 5
"""Steps that do not count for the median: the first compiles, the next ones fill caches."""
LAST_STEPS = 20
"""Those that count for the training loss."""


class Trainee:
    """A model, AdamW, whose learning rate rises to `lr` and falls again over `steps`, and the
    measurements taken while it trained.

    Attributes:
        name: its name in tables.
        losses: training loss of every step, in nats per token.
        seconds: wall time of every step; the device is idle at its start and end.
        memory: bytes, counted as `memory_kind` says; 0 before it was measured.
    """

    def __init__(self, name: str, model: GPT, *, steps: int, lr: float) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        rate = functools.partial(_rate, steps=steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.memory = 0

    @property
    def device(self) -> torch.device:
        return self.model.head.weight.device

    @property
    def can(self) -> Capabilities:
        """The capabilities of that device."""
        return capabilities(self.device)

    @property
    def memory_kind(self) -> str:
        """The meaning of `memory` on this device."""
        if self.can.asynchronous:
            return "peak memory of a step, above what stays resident"
        return "saved for backward"

    @property
    def train_loss(self) -> float:
        """Mean training loss of the last steps."""
        return statistics.fmean(self.losses[-LAST_STEPS:])

    @property
    def first_step(self) -> float:
        """Seconds of the first step: compilation and one step."""
        return self.seconds[0]

    @property
    def median(self) -> float:
        """Median seconds per step after the warm-up (after the first step in a very short run)."""
        return statistics.median(self.seconds[WARM_UP:] or self.seconds[1:] or self.seconds)

    def step(self, idx: Tensor, targets: Tensor) -> None:
        """Train on one batch and record loss and time."""
        with self._clock():
            loss = self.model(idx, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        self.losses.append(loss.item())

    def step_and_measure_memory(self, idx: Tensor, targets: Tensor) -> None:
        """Do one `step` and record its memory; slower than a plain step on CPU."""
        if self.can.asynchronous:
            resident = self.can.allocated_memory()
            self.step(idx, targets)
            self.memory = self.can.peak_memory() - resident
        else:
            with bytes_saved_for_backward(self.model) as saved:
                self.step(idx, targets)
            self.memory = sum(saved.values())

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        self.can.synchronize()
        start = time.perf_counter()
        yield
        self.can.synchronize()
        self.seconds.append(time.perf_counter() - start)


def _rate(step: int, steps: int) -> float:
    """Learning rate relative to its peak: it rises for a tenth of the steps, then half a cosine."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


@contextlib.contextmanager
def bytes_saved_for_backward(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Collect the tensors that autograd keeps for the backward: storage address -> bytes.

    Parameters and buffers, which exist anyway, do not count. The dict is filled inside the
    ``with`` block, by the forward.
    """
    saved: dict[int, int] = {}
    resident = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    alive: list[Tensor] = []  # keeps storages alive, so that addresses stay unique

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
