"""Autograd's engine, its nodes, its hooks, and how often a tensor was written; and autocast."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

# What is read of each tensor in each step, by `operator.attrgetter`, which makes no frame.
version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often the memory of a tensor was written, as autograd counts it."""
hooks_on: Callable[[torch.Tensor], tuple[Any, Any]] = operator.attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""A parameter's hooks on its gradient, and those behind its accumulation; empty or None: none."""


def base_of(result: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd takes this one for a view of; None: it is no view."""
    return result._base


def function_of(grad_fn: Any) -> Any:
    """The autograd.Function whose backward a node of autograd's graph runs, or None."""
    if not isinstance(grad_fn, torch.autograd.function.BackwardCFunction):
        return None
    return type(grad_fn)._forward_cls  # type: ignore[attr-defined]


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the backward that runs in this thread, as DDP's is called. It
    may call this again: then another is called behind it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_enabled(autocast: torch.autocast) -> bool:
    """Whether it turns autocast on where it is entered: not with `enabled=False`."""
    return autocast._enabled
