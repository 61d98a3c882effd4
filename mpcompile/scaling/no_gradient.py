"""Warn of an optimizer whose first step finds no gradient, and so changes nothing.

Mostly it steps before the backward, or behind `zero_grad()`, in every turn of the loop: nothing is
trained, and plain PyTorch says nothing. (A GradScaler does.)
"""

from __future__ import annotations

import warnings

from torch.optim import Optimizer

from ..errors import MPCompileWarning
from . import optimizer_state, parameters


def look(optimizer: Optimizer, *, has_closure: bool) -> None:
    """An optimizer is about to take a step; a closure makes the gradients within it."""
    state = optimizer_state.state_of(optimizer)
    if state.looked_for_gradient:
        return
    state.looked_for_gradient = True
    if has_closure:
        return
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ours = state.skips_by_itself or any(parameters.scales_of(p) for p in held)
    if ours and held and all(p.grad is None for p in held):
        say(optimizer, stacklevel=6)


def say(optimizer: Optimizer, stacklevel: int) -> None:
    """Say that a step of this optimizer has no gradient."""
    optimizer_state.state_of(optimizer).looked_for_gradient = True
    warnings.warn(
        f"mpcompile: this step of {type(optimizer).__name__} changes nothing, since none of its "
        "parameters has a gradient: call loss.backward() before step(), and zero_grad() behind it. "
        "Or are these the parameters of another model?",
        MPCompileWarning,
        stacklevel=stacklevel,
    )
