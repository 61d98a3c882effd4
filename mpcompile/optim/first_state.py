"""Makes, before the first step of a torch.optim class, the state that this step would make."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..scaling.parameters import parameters_of
from ..torch_inside.optimizers import init_group
from .masters import in_fp32, make_masters, zeros_like
from .members import Member


def initialise_state(optimizer: Optimizer, members: Sequence[Member]) -> None:
    """Make the state that a first step would make, so that the step can be traced with it there.

    torch.optim's classes make it in a method of their own. SGD's momentum starts as a
    copy of the gradient; without dampening, a start at zero gives the same after one step.
    """
    make_masters(optimizer, (m.param for m in members if m.updated))
    present = [p for p in parameters_of(optimizer) if p.grad is not None]
    with in_fp32(optimizer) as wide:
        stand_ins = [wide[p] for p in present if p in wide]
        with gradients_stand_by(stand_ins, stand_ins):
            _initialise(optimizer)
        updated = [(m.group, wide.get(m.param, m.param)) for m in members if m.updated]
        for group, param in updated if isinstance(optimizer, torch.optim.SGD) else ():
            settings = optimizer.param_groups[group]
            if settings["momentum"] and not settings["dampening"]:
                state = optimizer.state[param]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(param).detach()
    move_scalar_state(optimizer)


def _initialise(optimizer: Optimizer) -> None:
    """Have a class of torch.optim make the state of parameters that have a gradient."""
    init = init_group(optimizer)
    if init is None or not getattr(init, "__module__", "").startswith("torch.optim."):
        return  # a user's
    for group in optimizer.param_groups:
        lists: list[list[Any]] = [[] for _ in range(len(inspect.signature(init).parameters) - 1)]
        asked: dict[str, Any] = {k: group[k] for k in ("capturable", "fused") if k in group}
        for name in asked:
            group[name] = name == "capturable"
        try:
            # Some classes give their state the dtype of the gradient, which at O2 is low; the
            # traced step gets FP32 gradients.
            grads = [(p, p.grad) for p in group["params"] if p.grad is not None]
            low = [p for p, grad in grads if grad.dtype is not p.dtype]
            with gradients_stand_by(low, low):
                init(group, *lists)
        finally:
            group.update(asked)


@contextlib.contextmanager
def with_gradients(
    params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> Iterator[None]:
    """In this context, the parameters have these gradients, of any dtype."""
    stored = [(p, p.grad, p.grad_dtype) for p in params]
    try:
        for p, grad in zip(params, gradients, strict=True):
            _give(p, grad, None)
        yield
    finally:
        for p, grad, dtype in stored:
            _give(p, grad, dtype)


def _give(param: torch.Tensor, grad: torch.Tensor | None, dtype: torch.dtype | None) -> None:
    param.grad = None
    param.grad_dtype = dtype
    param.grad = grad


def gradients_stand_by(
    everyone: Sequence[torch.Tensor], params: Sequence[torch.Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Give these parameters, and no others, a gradient of zeros that takes no memory: a class makes
    the state of parameters that have one.
    """
    taking_part = set(map(id, params))
    return with_gradients(
        everyone, [zeros_like(p, p.dtype) if id(p) in taking_part else None for p in everyone]
    )


def move_scalar_state(optimizer: Optimizer) -> None:
    """Move step counters to their parameters' devices: a step must not read across devices."""
    everything: dict[Any, Any] = optimizer.state
    for param, state in everything.items():
        if not isinstance(param, torch.Tensor):  # an optimizer may keep what belongs to none
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim == 0 and value.device != param.device:
                state[key] = value.to(param.device)
