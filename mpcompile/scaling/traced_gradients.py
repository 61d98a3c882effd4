"""Let Dynamo trace a parameter whose gradient has another dtype than the parameter.

Dynamo breaks the graph at such a tensor: its fake could not be given the gradient. O2's parameters
are such tensors between two backwards, so anything compiled then (another batch size, `D(fake)`
after `D(fake.detach())`) would run in pieces, most of them in FP32. Neither Dynamo nor mpcompile
needs a fake with a gradient, so while something compiles Dynamo is told that these parameters, and
no others, have none. A program that reads `p.grad` still gets the real one, which Dynamo takes from
the program.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from ..torch_inside.dynamo import call_back, safe_grad_as

_hidden: set[type[torch.Tensor]] = set()
# Open while something compiles, in any thread; twice, if a reset made Dynamo forget an end.
_hiding = contextlib.ExitStack()


def hide_low_gradients(of: type[torch.Tensor]) -> None:
    """Make tracers see no gradient on tensors of this class whose gradient has another dtype, from
    the next compile on.
    """
    _hidden.add(of)
    listen_again()


def listen_again() -> None:
    """Do so still after a reset of Dynamo's, which forgets it."""
    if _hidden:
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
