"""A step that can't be traced yet, because its first run makes state: run operator by operator."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from ..state import guard
from .first_state import give_gradient
from .key import StepKey
from .results import Results
from .trace_context import raw_step


def eager_step(
    optimizer: Optimizer, key: StepKey, max_grad_norm: float | None, results: Results
) -> None:
    """One step as the optimizer's class does it, after the same checks, made on the host."""
    true = _true_gradients(key)
    norm = torch.nn.utils.get_total_norm(true)
    skip = _settle_scales(optimizer, key, true)
    results.write("skipped", torch.tensor(skip, device=norm.device))
    results.write("norm", norm)
    if skip:
        return
    if max_grad_norm is not None:
        factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        true = [t * factor for t in true]
    params = [m.param for m in key.members]
    stored = [(p.grad, p.grad_dtype) for p in params]
    try:
        for param, grad in zip(params, true, strict=True):
            give_gradient(param, grad)
        with torch.no_grad(), torch._C._DisableAutocast():
            raw_step(type(optimizer))(optimizer)
    finally:
        for param, (before, dtype) in zip(params, stored, strict=True):
            give_gradient(param, before, dtype)


def _true_gradients(key: StepKey) -> list[torch.Tensor]:
    """The unscaled gradients, each in its parameter's dtype."""
    multipliers = key.multipliers()
    true: list[torch.Tensor] = []
    for member, gradient in zip(key.members, key.gradients, strict=True):
        param = member.param
        assert param.grad is not None
        grad = param.grad.to(param.dtype)
        if gradient.scaled_by is not None:
            grad = grad / multipliers[gradient.scaled_by]
        true.append(grad)
    return true


def _settle_scales(optimizer: Optimizer, key: StepKey, true: list[torch.Tensor]) -> bool:
    """Tell each loss scale whether its gradients are finite; returns whether to skip the step."""
    skip = False
    if key.checked:
        for k, scale in enumerate(key.scales):
            own = [t for t, g in zip(true, key.gradients, strict=True) if k in g.scales]
            overflow = not all(bool(t.isfinite().all()) for t in own)
            overflows = guard.look(optimizer, scale)
            overflow |= overflows is not None and bool(overflows)
            scale.settle(overflow)
            skip |= overflow
    return skip
