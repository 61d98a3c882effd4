"""The dtype in which the gradient of a parameter that has a working copy is stored.

What reaches a parameter is its gradient: the loss scale is divided out before. It is FP32, but for
one case: without a loss scale, as in BF16, it stays in the copy's dtype as long as only the
parameter's MPOptimizer reads it, and half of the gradients' memory is saved. A second backward
makes the sum FP32. So may be whatever else a loop stores there (`grad_dtype` is None): a penalty on
the weights, a part of the model that runs uncompiled, a gradient set by hand. `p.grad.dtype` tells.

Dynamo breaks the graph at a parameter whose gradient has another dtype: its fake could not be given
the gradient. Parameters with such gradients are so between two backwards, and anything compiled
then (another batch size, `D(fake)` after `D(fake.detach())`) would run in pieces, most of them in
FP32. Neither Dynamo nor mpcompile needs a fake with a gradient, so while something compiles Dynamo
is told that these parameters, and no others, have none. A program that reads `p.grad` still gets
the real one, which Dynamo takes from the program.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..torch_inside.dynamo import safe_grad_as
from ..torch_inside.names import copy_all, multiply_all, will_run
from ..torch_inside.tracing_settings import call_back


def expect(master: torch.Tensor, *, low: bool) -> None:
    """Before a forward: let the gradient be stored in a low dtype, or in FP32 alone."""
    if low and master.grad_dtype is not None:
        master.grad_dtype = None
    elif not low and master.grad_dtype is not torch.float32:
        grad, master.grad = master.grad, None
        master.grad_dtype = torch.float32
        master.grad = None if grad is None else grad.float()


def stores(node: Any) -> bool:
    """Whether the running backward will store a gradient in this AccumulateGrad's parameter, or, as
    `torch.autograd.grad` does, return it.
    """
    try:
        return bool(will_run(node))
    except RuntimeError:  # raised for a leaf whose gradient is returned
        return False


def unscaled(gradients: Sequence[torch.Tensor], scale: torch.Tensor | None) -> list[torch.Tensor]:
    """Low gradients in FP32, divided by the loss scale (0-d) if there is one. Overflows stay."""
    if not gradients:
        return []
    wide = [torch.empty_like(g, dtype=torch.float32) for g in gradients]
    copy_all(wide, list(gradients))
    if scale is not None:
        multiply_all(wide, scale.reciprocal())
    return wide


_hidden: set[type[torch.Tensor]] = set()
# Open while something compiles, in any thread; twice, if a reset made Dynamo forget an end.
_hiding = contextlib.ExitStack()


def hide_low_gradients(of: type[torch.Tensor]) -> None:
    """Make tracers see no gradient on tensors of this class whose gradient has another dtype, from
    the next compile on.
    """
    _hidden.add(of)
    call_back(_begin, _end)


# Disabled for Dynamo, which looks at each frame of a `backward()` within a compiled function. It
# calls back under a lock of its own: no two threads are in here.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin(_: Any) -> None:
    _hiding.enter_context(safe_grad_as(_without_low))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end(_: Any) -> None:
    _hiding.close()


def _without_low(safe_grad: Any) -> Any:
    @functools.wraps(safe_grad)
    def hiding(t: Any) -> Any:
        grad = safe_grad(t)
        hide = grad is not None and grad.dtype is not t.dtype and isinstance(t, tuple(_hidden))
        return None if hide else grad

    return hiding
