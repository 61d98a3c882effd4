"""Raise where somebody differentiates a compiled backward, which is not possible.

AOTAutograd raises by itself only if an input of the backward needs a gradient: otherwise the
backward's results are constants. A stored weight needs one; its cast to a low dtype, which is
stored in its place, does not (read in torch 2.11 and 2.12, where a gradient penalty then trains
nothing, silently). So under `create_graph=True` we make the results of the backward no constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..errors import MPCompileError

__all__ = ["notice", "noticed"]

Gradients = tuple[Tensor | None, ...]


def noticed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled graph: its gradients raise if they are differentiated."""
    returns_inputs: bool | None = None  # known after the first call, and the same in each

    def graph(*args: Any) -> Any:
        nonlocal returns_inputs
        # An input that is returned has its own history. It is asked of no input otherwise: with
        # cold caches, that takes longer than all else here.
        before = _nodes(args) if returns_inputs is not False else set()
        results = run(*args)
        if returns_inputs is None:
            returns_inputs = _share(args, results, before)
        _notice(_nodes(results) - before)
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


def _notice(nodes: set[Node]) -> None:
    for node in nodes:
        node.register_hook(_connect)


def _nodes(values: Sequence[Any]) -> set[Node]:
    return {v.grad_fn for v in values if isinstance(v, Tensor) and v.grad_fn is not None}


def _connect(gradients: Gradients, _: Gradients) -> Gradients | None:
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
