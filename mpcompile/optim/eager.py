"""A step that isn't compiled, but run operator by operator: it can't be traced at all, or not yet,
because its first run makes state; or it belongs to a training step that runs in pieces only this
once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch.optim import Optimizer

from ..torch_inside.optimizers import without_wrappers
from .first_state import with_gradients
from .masters import followed, in_fp32, is_low
from .members import StepKey

_this_once = ContextVar("this_once", default=False)


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """In this context, no step of an MPOptimizer is compiled."""
    before = _this_once.set(True)
    try:
        yield
    finally:
        _this_once.reset(before)


def is_op_by_op() -> bool:
    """Whether steps run operator by operator now."""
    return _this_once.get()


def eager_step(
    optimizer: Optimizer, key: StepKey, skip: torch.Tensor | None, factor: torch.Tensor | None
) -> None:
    """The step as the optimizer's class does it. Reads on the host whether to do it.

    Args:
        skip: 0-d bool: change nothing. None: in no case.
        factor: by which gradients are multiplied. None: not at all.
    """
    if skip is not None and skip:
        return
    true = [  # each in the dtype that is updated
        m.param.grad.to(torch.float32 if is_low(m.param) else m.param.dtype)  # type: ignore[union-attr]  # there
        for m in key.members
    ]
    if factor is not None:
        true = [t * factor for t in true]
    low = [m.param for m in key.members if m.updated and is_low(m.param)]
    with in_fp32(optimizer) as wide:
        for p in low:
            wide[p].copy_(followed(p, wide[p]))
        params = [wide.get(m.param, m.param) for m in key.members]
        with with_gradients(params, true):
            without_wrappers(type(optimizer).step)(optimizer)
        for p in low:
            p.copy_(wide[p])
