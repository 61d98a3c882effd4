"""Raise where somebody differentiates a compiled backward, which is not possible.

AOTAutograd raises by itself only if an input of the backward needs a gradient: otherwise the
backward's results are constants. A stored weight needs one; its cast to a low dtype, which is
stored in its place, does not (read in torch 2.11 and 2.12, where a gradient penalty then trains
nothing, silently). So under `create_graph=True` we make the results of the backward no constants.

AOTAutograd makes an autograd.Function for each graph that it compiles. The backward of this class
is wrapped, once: a hook on the node of each call costs a small network a few percent of its step,
since torch hands it all gradients. Other nodes get the hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..errors import MPCompileError
from ..torch_inside.aot import is_compiled
from ..torch_inside.autograd import function_of

__all__ = ["notice", "noticed"]

Gradients = tuple[Tensor | None, ...]


def noticed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled graph: its gradients raise if they are differentiated."""
    # Both are known after the first call (in which something has a history), and the same in each:
    # Dynamo compiles another graph where other inputs need gradients.
    returns_inputs: bool | None = None
    raise_by_themselves = False

    def graph(*args: Any) -> Any:
        nonlocal returns_inputs, raise_by_themselves
        if raise_by_themselves:
            return run(*args)
        # An input that is returned has its own history. It is asked of no input otherwise: with
        # cold caches, that takes longer than all else here.
        before = _nodes(args) if returns_inputs is not False else set()
        results = run(*args)
        if returns_inputs is None:
            returns_inputs = _share(args, results, before)
        nodes = _nodes(results)
        raise_by_themselves = _notice(nodes - before) and before.isdisjoint(nodes)
        return results

    return graph


def _share(args: Sequence[Any], results: Sequence[Any], before: set[Node]) -> bool:
    """Whether a result is an input, or has the history of one."""
    given = {id(a) for a in args if isinstance(a, Tensor)}
    return any(id(r) in given for r in results) or not before.isdisjoint(_nodes(results))


def notice(results: Sequence[Any]) -> None:
    """The same for the results of an autograd.Function: `once_differentiable` raises only if the
    gradients that come in need one themselves.
    """
    _notice(_nodes(results))


def _notice(nodes: set[Node]) -> bool:
    """Let the gradients of these raise. Returns whether those of any such nodes now do."""
    functions = [function_of(node) for node in nodes]
    for node, function in zip(nodes, functions, strict=True):
        if is_compiled(function):
            _wrap_backward(function)
        else:
            node.register_hook(lambda gradients, _: _connected(gradients))
    return bool(nodes) and all(map(is_compiled, functions))


def _wrap_backward(function: Any) -> None:
    """Let the gradients raise that this autograd.Function returns, in each of its backwards."""
    if function in _wrapped:
        return
    _wrapped.add(function)
    backward = function.backward

    def raising(ctx: Any, *gradients: Any) -> Any:
        results = backward(ctx, *gradients)
        return _connected(results) or results

    function.backward = staticmethod(raising)


# classes of AOTAutograd whose backward is wrapped
_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()


def _nodes(values: Sequence[Any]) -> set[Node]:
    return {v.grad_fn for v in values if isinstance(v, Tensor) and v.grad_fn is not None}


def _connected(gradients: Gradients) -> Gradients | None:
    """The same gradients, which raise when they are differentiated; None: nobody can."""
    if not torch.is_grad_enabled():
        return None
    anchor = torch.empty(0, requires_grad=True)
    return tuple(
        g if g is None else _Once.apply(g, anchor)  # type: ignore[no-untyped-call]
        for g in gradients
    )


class _Once(torch.autograd.Function):
    """Identity on a gradient; the result needs a gradient, and its backward raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise MPCompileError(
            "the gradients of a compiled graph can't be differentiated (double backward, as for a "
            "gradient penalty): leave the model that they go through uncompiled"
        )
