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

from ..ranks.shards import local
from ..scaling import guard
from ..torch_inside.names import autocast_off
from ..torch_inside.optimizers import without_wrappers
from .first_state import with_gradients
from .masters import follow, in_fp32, is_low
from .members import StepKey
from .reports import Results

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
    optimizer: Optimizer, key: StepKey, max_grad_norm: float | None, results: Results
) -> None:
    """One step as the optimizer's class does it, after the same checks, made on the host."""
    true = [  # each in the dtype that is updated
        m.param.grad.to(torch.float32 if is_low(m.param) else m.param.dtype)  # type: ignore[union-attr]  # there
        for m in key.members
    ]
    overflows, norm = _measured(optimizer, key, true, clipped=max_grad_norm is not None)
    for scale, overflow in zip(key.scales, overflows, strict=key.checked):
        scale.settle(overflow)
    skip = any(overflows)
    results.write("skipped", torch.tensor(skip, device=norm.device))
    results.write("norm", norm)
    if skip:
        return
    if max_grad_norm is not None:
        factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        true = [t * factor for t in true]
    low = [m.param for m in key.members if m.updated and is_low(m.param)]
    with torch.no_grad(), in_fp32(optimizer) as wide:
        follow(low, [wide[p] for p in low])
        params = [wide.get(m.param, m.param) for m in key.members]
        with with_gradients(params, true), autocast_off():
            without_wrappers(type(optimizer).step)(optimizer)
        for p in low:
            p.copy_(wide[p])
    # A step may write to the memory of a parameter by way of another tensor, which no count tells.
    torch.autograd.graph.increment_version([m.param for m in key.members if m.updated])


def _measured(
    optimizer: Optimizer, key: StepKey, true: list[torch.Tensor], *, clipped: bool
) -> tuple[list[bool], torch.Tensor]:
    """For each loss scale whether one of its gradients is not finite, and the norm of all. Where
    ranks share the parameters, of all ranks: the norm only if gradients are clipped. The ranks
    exchange what a compiled step exchanges.
    """
    overflows: list[bool] = []
    for k, scale in enumerate(key.scales if key.checked else ()):
        own = [t for t, g in zip(true, key.gradients, strict=True) if k in g.scales]
        overflows.append(bool(guard.overflowed(own, guard.look(optimizer, scale))))
    shares = [local(t) * g.replicas**-0.5 for t, g in zip(true, key.gradients, strict=True)]
    norm = torch.nn.utils.get_total_norm(shares)
    if key.connected is None:
        return overflows, norm
    mine = [*map(float, overflows), *([float(norm) ** 2] if clipped else [])]
    sums = key.connected.sum(torch.tensor(mine, dtype=torch.float64))
    flags = sums[: len(overflows)].tolist()
    return [flag > 0 for flag in flags], sums[-1].sqrt().to(norm) if clipped else norm
