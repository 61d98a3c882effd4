"""torch's own fused kernel as the update of a step, where there is one.

It takes `found_inf` and `grad_scale` on the device, as GradScaler gives it: it skips, and
multiplies gradients. So nothing is traced or compiled. It writes no low-precision copies and takes
FP32 gradients alone: else the step is traced. So it is on GPUs, where one program updates all
parameters, and nothing was measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from .. import ir
from ..torch_inside.optimizers import without_wrappers
from .members import Member, StepKey

_CLASSES = (Adagrad, Adam, AdamW, SGD)


def fits(optimizer: Optimizer, key: StepKey) -> bool:
    """Whether the kernel does all that a step for this key must do. Its state is there."""
    return (
        type(optimizer) in _CLASSES
        and key.connected is None
        and all(copy is None for copy in key.copies)
        and all(map(_is_served, optimizer.param_groups))
        and all(
            gradient.dtype is torch.float32 and _lies_alike(optimizer, member, strides)
            for member, gradient, strides in zip(
                key.members, key.gradients, key.strides, strict=True
            )
        )
    )


def _is_served(group: dict[str, Any]) -> bool:
    return not group.get("capturable") and not isinstance(group["lr"], torch.Tensor)


def settings_of(optimizer: Optimizer) -> list[object]:
    """Of each param group what must not change: whether it is served, and the state it needs."""
    return [
        (_is_served(group), bool(group.get("momentum")), group.get("amsgrad"))
        for group in optimizer.param_groups
    ]


def _lies_alike(optimizer: Optimizer, member: Member, strides: tuple[int, ...]) -> bool:
    """Whether a parameter, its gradient and its state have each element at the same place: kernels
    take the memory as it is.
    """
    param, group = member.param, optimizer.param_groups[member.group]
    state = optimizer.state.get(param, {})
    if group.get("momentum") and state.get("momentum_buffer") is None:
        return False  # SGD's first step makes it, and a skipped one leaves it as it was allocated
    alike = [param, *(v for k, v in state.items() if k != "step" and isinstance(v, torch.Tensor))]
    counter = state.get("step")
    wide = [d for d, size in enumerate(param.shape) if size > 1]  # others' strides say nothing
    return (
        member.updated
        and ir.is_dense(param)
        and all(t.dtype is torch.float32 and t.shape == param.shape for t in alike)
        and all(t.stride(d) == strides[d] for t in alike for d in wide)
        and (counter is None or counter.dtype is torch.float32)
    )


def fused_step(
    optimizer: Optimizer, skip: torch.Tensor | None, factor: torch.Tensor | None
) -> None:
    """The step of the optimizer's class, by its fused kernel.

    Args:
        skip: 0-d bool: change nothing. None: in no case.
        factor: by which gradients are multiplied, 0-d FP32; they are stored so, as after
            `clip_grad_norm_`. None: not at all.
    """
    asked = [(group, group["fused"]) for group in optimizer.param_groups]
    given = {
        **({"found_inf": skip.to(torch.float32)} if skip is not None else {}),
        **({"grad_scale": factor.reciprocal()} if factor is not None else {}),
    }
    try:
        vars(optimizer).update(given)
        for group, _ in asked:
            group["fused"] = True
        without_wrappers(type(optimizer).step)(optimizer)
    finally:
        for group, before in asked:
            group["fused"] = before
        for name in given:
            delattr(optimizer, name)
