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

    def graph(*args: Any) -> Any:
        before = _nodes(args)  # an input that is returned has its own history
        results = run(*args)
        _notice(_nodes(results) - before)
        return results

    return graph


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
