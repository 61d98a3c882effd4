"""Torch's public step hooks: they run before and after each step of every optimizer of the process.

They cost one look-up while no loss scale exists. While one does, a plain optimizer's step costs one
host synchronisation, as GradScaler's does. An MPOptimizer's step checks on the device; these hooks
skip it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..ranks.zero import is_zero, partition_of
from . import copies, foreign, guard, optimizers, reductions, shardings
from .scale_search import closure_runs


@functools.cache
def register() -> None:
    """Install the hooks, once. `mpcompile()` and the backend do this before anything is compiled:
    the closure of a step may be what compiles the first graph.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if guard.is_needed():
        foreign.look_for_scaler(optimizer)
    _agree(optimizer)
    by_itself = optimizers.state_of(optimizer).skips_by_itself
    if is_zero(optimizer):  # this look is also that of the optimizer that it steps
        guard.skips_by_itself(partition_of(optimizer))
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if closure is None:
        if not by_itself:
            _check_gradients(optimizer)
        return None
    # The gradients are made inside the step: check them right after the closure has run. (It may
    # even compile the model, so nothing is known about the parameters before.)
    checked = _checked_closure(optimizer, closure, by_itself=by_itself)
    return (args[0], *args[2:]), {**kwargs, "closure": checked}


def _agree(optimizer: Optimizer) -> None:
    """Let ranks agree on what is open between them."""
    reductions.before_step(optimizer)
    shardings.before_step(optimizer)


def _checked_closure(
    optimizer: Optimizer, closure: Callable[[], Any], *, by_itself: bool
) -> Callable[[], Any]:
    state, calls = optimizers.state_of(optimizer), 0

    def run() -> Any:
        nonlocal calls
        calls += 1
        state.calls_closure_again |= calls > 1
        with closure_runs(called_again=state.calls_closure_again):
            loss = closure()
        _agree(optimizer)
        if not by_itself:
            _check_gradients(optimizer)
        return loss

    return run


def _check_gradients(optimizer: Optimizer) -> None:
    if guard.is_needed():
        guard.skip_if_overflowed(optimizer)
        copies.refuse_scaled(optimizer)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    guard.show_hidden(optimizer)


def has_others(optimizer: Optimizer) -> bool:
    """Whether hooks other than these run around the optimizer's steps."""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(optimizer, kind, None) for kind in kinds):
        return True
    room = f"{__name__.partition('.')[0]}."  # ours need no step to be called
    before, after = _global_optimizer_pre_hooks.values(), _global_optimizer_post_hooks.values()
    modules = [getattr(hook, "__module__", None) or "" for hook in (*before, *after)]
    return not all(module.startswith(room) for module in modules)
