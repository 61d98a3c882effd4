"""Let a compiled backward run several times over one forward: `retain_graph=True`, or
`torch.autograd.grad` once for each loss.

A backward that Inductor compiles may write to tensors that its forward saved for it ("donated
buffers"): less memory is taken. If the first backward of all keeps its graph, it is compiled
without that; otherwise AOTAutograd raises where a later one keeps it. Here such a backward gets
copies of these tensors instead. Who keeps no graph pays nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node

from ..ir.fakes import duplicate
from ..ir.units import grad_fns
from ..torch_inside.aot import CopiedContext, is_compiled
from ..torch_inside.autograd import function_of, keeps_graph

__all__ = ["is_kept", "running_again"]


def is_kept() -> bool:
    """Whether the backward that runs in this thread keeps its graph."""
    return keeps_graph()


def running_again(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what AOTAutograd compiled: its backward may run several times over one forward."""
    known = False

    def graph(*args: Any) -> Any:
        nonlocal known
        if known:
            return run(*args)
        before = grad_fns(args)
        results = run(*args)
        known = True
        # An input that the graph wrote to has a new history, too.
        for function in _compiled(grad_fns((*results, *args)), before) - set(_wrapped):
            _wrapped.add(function)
            _wrap_backward(function)
        return results

    return graph


def _compiled(nodes: set[Node], before: set[Node]) -> set[Any]:
    """AOTAutograd's classes between the results of a graph and the histories of its inputs. (What
    it returns may be a view of what the class returned.)
    """
    found, seen, left = set(), set(before), list(nodes)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_compiled(function := function_of(node)):
            found.add(function)
        left += [below for below, _ in node.next_functions if below is not None]
    return found


def _wrap_backward(function: Any) -> None:
    """Give each backward of a class of AOTAutograd's that keeps its graph, and may write to what is
    saved in it, copies of that.
    """
    backward, donated = function.backward, None

    def sparing(ctx: Any, *gradients: Any) -> Any:
        nonlocal donated
        if is_kept() and function.compiled_bw is not None:
            metadata = function.metadata
            found = [i - metadata.num_symints_saved_for_bw for i in metadata.bw_donated_idxs or ()]
            if donated is None:
                donated = found
            # AOTAutograd raises if it finds any. (Removed last: another thread may look, too.)
            metadata.bw_donated_idxs = []
            if donated:
                ctx = CopiedContext(ctx, donated, duplicate)
        return backward(ctx, *gradients)

    # Disabled for Dynamo, which looks at each frame of a `backward()` within a compiled function.
    function.backward = staticmethod(torch.compiler.disable(sparing))


# classes of AOTAutograd whose backward is wrapped
_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
