"""A compiled backward can't be differentiated again, and says so.

AOTAutograd raises when somebody does, but only where a tensor that the backward was given needs a
gradient: else what it returns are constants. A stored weight does; its cast to a low dtype, which
is stored instead of it, does not (read in torch 2.11 and 2.12, where a gradient penalty then trains
nothing, without a word). So under `create_graph=True` what it returns is no constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..errors import MPCompileError

__all__ = ["noticed"]

Gradients = tuple[Tensor | None, ...]


def noticed(run: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph whose gradients raise when they are differentiated."""

    def graph(*args: Any) -> Any:
        before = _nodes(args)  # an input that is returned has a history of its own
        results = run(*args)
        for node in _nodes(results) - before:
            node.register_hook(_connect)
        return results

    return graph


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
    """A gradient as it is; needs a gradient itself."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise MPCompileError(
            "the gradients of a compiled graph can't be differentiated (double backward, as for a "
            "gradient penalty): leave the model that they go through uncompiled"
        )
