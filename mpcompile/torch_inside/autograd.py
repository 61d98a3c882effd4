"""Autograd's engine, its nodes, its hooks, and how often a tensor was written."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .private_names import Part, attribute, private

if TYPE_CHECKING:
    from torch._C import _current_autograd_node as current_node
    from torch._C import _current_graph_task_id as running_backward
    from torch._C import _set_grad_enabled as set_grad_enabled
    from torch._C import _will_engine_execute_node as will_run
    from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
    from torch._C._autograd import _saved_tensors_hooks_disable as forbid_saved_hooks
    from torch._C._autograd import _saved_tensors_hooks_enable as allow_saved_hooks
    from torch._C._autograd import (
        _saved_tensors_hooks_get_disabled_error_message as saved_hooks_forbidden,
    )
    from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_hooks
else:
    current_node = private(
        "torch._C:_current_autograd_node", "tells a backward's operators", Part.SAY
    )
    # As torch.utils.checkpoint reads it.
    running_backward = private(
        "torch._C:_current_graph_task_id", "numbers the backwards of a thread", Part.COMPILE
    )
    set_grad_enabled = private(
        "torch._C:_set_grad_enabled", "switches grad mode in Dynamo's graph", Part.COMPILE
    )
    will_run = private(
        "torch._C:_will_engine_execute_node", "tells if a gradient is stored", Part.OPTIMIZER
    )
    keeps_graph = private(
        "torch._C._autograd:_get_current_graph_task_keep_graph",
        "tells if a backward keeps its graph",
        Part.COMPILE,
    )
    forbid_saved_hooks = private(
        "torch._C._autograd:_saved_tensors_hooks_disable", "forbids saved hooks", Part.COMPILE
    )
    allow_saved_hooks = private(
        "torch._C._autograd:_saved_tensors_hooks_enable", "allows saved hooks", Part.COMPILE
    )
    saved_hooks_forbidden = private(
        "torch._C._autograd:_saved_tensors_hooks_get_disabled_error_message",
        "tells if hooks on saved tensors are forbidden",
        Part.COMPILE,
    )
    top_saved_hooks = private(
        "torch._C._autograd:_top_saved_tensors_default_hooks",
        "finds the caller's hooks on saved tensors",
        Part.COMPILE,
    )

GET_DATA: Any = private(
    "torch._C._autograd:_get_data_attr", "is `x.data` in Dynamo's graph", Part.COMPILE
)
# What is read of each tensor in each step, by `operator.attrgetter`, which makes no frame.
version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often the memory of a tensor was written, as autograd counts it."""
hooks_on: Callable[[torch.Tensor], tuple[Any, Any]] = operator.attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""A parameter's hooks on its gradient, and those behind its accumulation; empty or None: none."""

__all__ = [
    "GET_DATA",
    "allow_saved_hooks",
    "base_of",
    "call_after_backward",
    "current_node",
    "forbid_saved_hooks",
    "function_of",
    "hooks_on",
    "keeps_graph",
    "running_backward",
    "saved_hooks_forbidden",
    "set_grad_enabled",
    "top_saved_hooks",
    "version",
    "will_run",
]


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


attribute("torch.autograd:Variable._execution_engine", "calls when a backward ends", Part.COMPILE)
attribute("torch:Tensor._version", "tells that a tensor was written", Part.COMPILE)
attribute("torch:Tensor._post_accumulate_grad_hooks", "tells who reads a gradient", Part.OPTIMIZER)
attribute("torch:Tensor._base", "tells a view from what it views", Part.COMPILE)
