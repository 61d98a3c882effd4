"""What is known of each optimizer of the process that took a step or checks overflows itself."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from .loss_scale import LossScale


class OptimizerState:
    """What is known of one optimizer.

    Attributes:
        skips_by_itself: its steps check the gradients themselves, as an MPOptimizer's do.
        poisoned: it holds, and has skipped for, a gradient that overflowed in a graph that reads
            none of its parameters.
        looked_for_scaler: a step at which its gradients were scaled was looked at (`foreign.py`).
        looked_for_gradient: its first step was looked at (`hooks.py`).
        looked_for_masters: a step was looked at for FP32 masters (`runtime/stalls.py`).
        watch: what looks whether its gradients stay finite (`runtime/stays_finite.py`).
        hidden: (parameter, gradient) pairs that its step must not see.
        beside: loss scale -> see `agreement.beside`, and when that was derived.
    """

    def __init__(self) -> None:
        self.skips_by_itself = self.poisoned = False
        self.looked_for_scaler = self.looked_for_gradient = self.looked_for_masters = False
        self.watch: Any = None
        self.beside: weakref.WeakKeyDictionary[LossScale, tuple[Any, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self.hidden: list[tuple[torch.Tensor, torch.Tensor]] = []


# An optimizer's id -> the optimizer and its state. Each step asks several times, and a weak
# dictionary of torch's or Python's makes an object for each question.
_states: dict[int, tuple[weakref.ref[Optimizer], OptimizerState]] = {}


def state_of(optimizer: Optimizer) -> OptimizerState:
    """The state of an optimizer, which callers change in place."""
    known = _states.get(id(optimizer))
    if known is not None and known[0]() is optimizer:
        return known[1]
    key, states = id(optimizer), _states
    alive = weakref.ref(optimizer, lambda _: states.pop(key, None))
    states[key] = alive, OptimizerState()
    return states[key][1]


def parameters_of(optimizer: Optimizer) -> tuple[torch.Tensor, ...]:
    """All parameters of an optimizer, in the order of its groups."""
    return tuple(p for group in optimizer.param_groups for p in group["params"])
