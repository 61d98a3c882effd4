"""Clipping gradients of which some are stored in FP16 times the loss scale.

At O2 in FP16 with an MPOptimizer, `p.grad` of a matrix is its gradient times a multiplier that is
kept with it (`low_gradients.py`). Torch's functions take it for the gradient. These take both
kinds. Where nothing is stored scaled, they call torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..torch_inside.tensors import norm_of_each
from .copies import copies_of
from .loss_scale import LossScale
from .low_gradients import LowGradient, on_one_scale

_Stored = list[tuple[LowGradient, torch.Tensor]]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_`, also for gradients that are stored times the loss scale.

    These are not written: the multiplier that is kept with them is divided by the factor instead,
    so nothing is rounded, and no step is compiled anew for another `max_norm`. Clip in one call
    what is stepped together: gradients of one loss scale that were clipped by different factors are
    brought back to one multiplier by the step, or by the next call, which rounds them in FP16.

    Returns:
        0-d FP32 on the device: the norm of the true gradients before clipping.

    Raises:
        MPCompileError: a scaled gradient was changed since its backward.
        RuntimeError: the norm is not finite, under `error_if_nonfinite`.
    """
    parameters, norm_type = listed(parameters), float(norm_type)
    plain, by_scale = _parted(parameters)
    if not by_scale:
        return torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    norms = [_true_norm(stored, norm_type) for stored in by_scale.values()]
    if plain:
        gradients = [p.grad for p in plain if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients, norm_type, foreach=foreach))
    device = norms[0].device
    total = _joined([n.to(device) for n in norms], norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the total norm of order {norm_type} of these gradients is not finite")
    if plain:
        torch.nn.utils.clip_grads_with_norm_(plain, max_norm, total, foreach)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for stored in by_scale.values():
        assert stored[0][0].stored is not None
        clipped = stored[0][0].stored.clipped(factor)
        for low, _ in stored:
            low.stored = clipped
    return total


@torch.no_grad()
def clip_grad_value_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """`torch.nn.utils.clip_grad_value_`, also for gradients that are stored times the loss scale.

    An element of those that is not finite stays: the optimizer's step must see it and be skipped.

    Raises:
        MPCompileError: a scaled gradient was changed since its backward.
    """
    plain, by_scale = _parted(listed(parameters))
    if plain:
        torch.nn.utils.clip_grad_value_(plain, clip_value, foreach)
    for stored in by_scale.values():
        bound = clip_value * on_one_scale(stored)
        for low, grad in stored:
            clamped = grad.float().clamp(-bound, bound).to(grad.dtype)
            grad.copy_(clamped.where(grad.isfinite(), grad))
            low.note_arrival()


def stores_scaled(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the gradient of one of these parameters is stored times the loss scale."""
    return bool(_parted(parameters)[1])


def listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters that `clip_grad_norm_` was given, one or several, as a list."""
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _parted(
    parameters: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], dict[LossScale, _Stored]]:
    """The parameters with a gradient that is stored as it is, and the scaled gradients by scale."""
    plain: list[torch.Tensor] = []
    by_scale: dict[LossScale, _Stored] = {}
    for parameter in parameters:
        grad = parameter.grad
        low = next((c.gradient for c in copies_of(parameter).values()), None)
        if grad is None:
            continue
        if low is not None and low.scale is not None and low.is_scaled(grad):
            by_scale.setdefault(low.scale, []).append((low, grad))
        else:
            plain.append(parameter)
    return plain, by_scale


def _true_norm(stored: _Stored, norm_type: float) -> torch.Tensor:
    """The global norm of gradients of one scale, divided by it. Computed in FP32: in FP16 a sum of
    squares overflows.
    """
    multiplier = on_one_scale(stored)  # first: it may rewrite gradients
    each = norm_of_each([grad for _, grad in stored], norm_type, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(each), norm_type)
    return norm / multiplier if norm_type != 0 else norm  # of order 0 it counts gradients


def _joined(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The global norm, from the global norm of each group of gradients: 0-d."""
    stacked = torch.stack(list(norms))
    if norm_type == 0:  # how many gradients aren't all zero, in each group
        return stacked.sum()
    total: torch.Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return total
