"""The ways in which a model takes a training step: mpcompile's, and those of its peers."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from mpcompile import MPCompileWarning, compiled_plans, mpcompile
from mpcompile.capture.breaks import skipped_since

from .making import Entry, Inputs

__all__ = ["ARMS", "AUTOCAST", "BOTH", "COMPILED", "HALF", "LEVELS"]
__all__ += ["Draw", "Stepped", "floating", "run"]

COMPILED, AUTOCAST, HALF = "compile FP32", "autocast", "pure half"
BOTH = "compile + autocast"
LEVELS = ("O1", "O2")
ARMS = (COMPILED, AUTOCAST, BOTH, HALF, *LEVELS)

_TRIES = 30
"""Steps that a scale may take to fit: GradScaler starts at 2^16 and halves."""
_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Draw:
    """Weights and a batch."""

    weights: Mapping[str, Tensor]
    inputs: Inputs


@dataclasses.dataclass
class Stepped:
    """What an arm did with the draws.

    Attributes:
        gradients: for each draw, of each parameter that has one, unscaled, in FP64.
        skipped: steps that changed nothing, because gradients overflowed.
        graphs: that Dynamo had made when it was done with each draw.
        frames: that Dynamo left to Python, and why.
        left: why a graph of ours stayed in FP32.
        warned: mpcompile's own warnings.
    """

    gradients: list[dict[str, Tensor]]
    skipped: int = 0
    graphs: list[int] = dataclasses.field(default_factory=list)
    frames: list[str] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)
    warned: list[str] = dataclasses.field(default_factory=list)


def floating(value: Any, dtype: torch.dtype) -> Any:
    """The same tensor or number; the same dict, list or tuple of them, at any depth: with
    floating-point tensors in `dtype`.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: floating(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(floating(item, dtype) for item in value)
    return value


def run(arm: str, entry: Entry, model: nn.Module, draws: list[Draw]) -> Stepped:
    """One training step of `arm` for each of `draws`, on a copy of `model`.

    Raises:
        RuntimeError: no scale was found at which the gradients are finite, or a step moved nothing.
    """
    torch._dynamo.reset()
    counters.clear()
    model = copy.deepcopy(model)
    called = _Half(model, entry.low) if arm == HALF else model
    if arm == COMPILED:
        model.compile(backend="eager")
    elif arm == BOTH:
        model.compile(backend="aot_eager")
    elif arm in LEVELS:
        mpcompile(model, dtype=entry.low, level=arm, emit="aot_eager")
    scales = arm in (AUTOCAST, BOTH, HALF) and entry.low == torch.float16
    scaler = torch.amp.GradScaler("cpu") if scales else None
    found = Stepped([])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for draw in draws:
            model.load_state_dict(draw.weights)
            torch.manual_seed(0)  # for a model that samples
            with torch.autocast("cpu", entry.low, enabled=arm in (AUTOCAST, BOTH)):
                found.skipped += _step(entry, called, draw.inputs, scaler)
            found.gradients.append(gradients(model))
            found.graphs.append(counters["stats"]["unique_graphs"])
    found.warned = [str(w.message) for w in caught if issubclass(w.category, MPCompileWarning)]
    found.frames = list(skipped_since({}))
    if arm in LEVELS:
        found.left = [plan.left for plan in compiled_plans(model) if plan.left]
    return found


class _Half(nn.Module):
    """A model that computes wholly in a low dtype, from parameters and a batch in FP32."""

    def __init__(self, model: nn.Module, low: torch.dtype) -> None:
        super().__init__()
        self.model, self.low = model, low

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        low = floating(tensors, self.low)
        return torch.func.functional_call(
            self.model, low, floating(args, self.low), floating(kwargs, self.low)
        )


def _step(entry: Entry, model: nn.Module, inputs: Inputs, scaler: Any) -> int:
    """Train until one step wasn't skipped; how many were."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    before = [p.detach().clone() for p in model.parameters()]
    for skipped in range(_TRIES):
        optimizer.zero_grad()
        loss = entry.loss(model, inputs)
        with torch.autocast("cpu", enabled=False):
            _backward(loss, optimizer, scaler)
        if any(not p.equal(b) for p, b in zip(model.parameters(), before, strict=True)):
            return skipped
    raise RuntimeError(f"{_TRIES} steps moved no parameter")


def _backward(loss: Tensor, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    if scaler is None:
        loss.backward()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of each parameter that has one, in FP64."""
    named = model.named_parameters()
    return {name: p.grad.double() for name, p in named if p.grad is not None}
