"""Let Dynamo trace a parameter whose gradient has another dtype than the parameter.

It breaks the graph at such a tensor: the fake that stands for it could not be given the gradient.
That is what O2's parameters are between two backwards, so whatever is compiled then (another batch
size, `D(fake)` after `D(fake.detach())`) would run in pieces, most of them in FP32. Neither Dynamo
nor we need a fake with a gradient: of these parameters, and no others, it is told that they have
none. A program that reads `p.grad` still gets the real one, which Dynamo takes from the program.

Both modules below ask `safe_grad` (read in torch 2.13; the same in 2.11). Without it graphs break.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._dynamo.variables import builder
from torch._subclasses import meta_utils


@functools.cache
def hide_low_gradients(of: type[torch.Tensor]) -> None:
    """Tell tracers that tensors of this class whose gradient has another dtype have none, from now
    on and once.
    """
    for module in (builder, meta_utils):
        known = getattr(module, "safe_grad", None)
        if known is not None:
            setattr(module, "safe_grad", _hiding(known, of))  # noqa: B010


def _hiding(safe_grad: Any, of: type[torch.Tensor]) -> Any:
    @functools.wraps(safe_grad)
    def hiding(t: Any) -> Any:
        grad = safe_grad(t)
        hide = isinstance(t, of) and grad is not None and grad.dtype is not t.dtype
        return None if hide else grad

    return hiding
