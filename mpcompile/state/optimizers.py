"""What is known of each optimizer of the process that has taken a step, or will skip by itself."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from .loss_scale import LossScale
    from .overflows import Count


class OptimizerState:
    """What is known of one optimizer.

    Attributes:
        skips_by_itself: its steps look at the gradients themselves, as an MPOptimizer's do.
        looks: where it looked last, of the backward passes of each loss scale.
        poisoned: it holds, and has skipped for, a gradient that overflowed in a graph which none of
            its parameters is an input of.
        hidden: parameters whose gradients its step must not see, and these gradients.
        nodes: the AccumulateGrad nodes that call us, by the `LowGradient` they call: they live, and
            keep their parameters alive, as long as the optimizer.
    """

    def __init__(self) -> None:
        self.skips_by_itself = False
        self.looks: weakref.WeakKeyDictionary[LossScale, Count] = weakref.WeakKeyDictionary()
        self.poisoned = False
        self.hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.nodes: dict[int, Any] = {}


_states: weakref.WeakKeyDictionary[Optimizer, OptimizerState] = weakref.WeakKeyDictionary()


def state_of(optimizer: Optimizer) -> OptimizerState:
    """What is known of an optimizer; to be changed in place."""
    state = _states.get(optimizer)
    if state is None:
        state = _states[optimizer] = OptimizerState()
    return state
