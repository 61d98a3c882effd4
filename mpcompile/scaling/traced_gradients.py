"""Let Dynamo trace a parameter whose gradient has another dtype than the parameter.

Dynamo breaks the graph at such a tensor: its fake could not be given the gradient. O2's parameters
are such tensors between two backwards, so anything compiled then (another batch size, `D(fake)`
after `D(fake.detach())`) would run in pieces, most of them in FP32. Neither Dynamo nor mpcompile
needs a fake with a gradient, so Dynamo is told that these parameters, and no others, have none. A
program that reads `p.grad` still gets the real one, which Dynamo takes from the program.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..torch_inside.dynamo_names import wrap_safe_grad


@functools.cache
def hide_low_gradients(of: type[torch.Tensor]) -> None:
    """Make tracers see no gradient on tensors of this class whose gradient has another dtype; takes
    effect once, for the process.
    """
    wrap_safe_grad(lambda safe_grad: _hiding(safe_grad, of))


def _hiding(safe_grad: Any, of: type[torch.Tensor]) -> Any:
    @functools.wraps(safe_grad)
    def hiding(t: Any) -> Any:
        grad = safe_grad(t)
        hide = isinstance(t, of) and grad is not None and grad.dtype is not t.dtype
        return None if hide else grad

    return hiding
