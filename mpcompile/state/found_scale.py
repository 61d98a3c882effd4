"""Where a search for a loss scale begins, and what becomes of what it finds."""

from __future__ import annotations

import logging

import torch

from .. import logs
from ..ir.scale import HEADROOM, INIT_SCALE
from .loss_scale import LossScale


def first_tried(scale: LossScale) -> float:
    """The scale that a search begins with; waits for the device."""
    top = min(INIT_SCALE, scale.max_scale)
    if scale.fitting:
        return top * HEADROOM
    value = _known(scale)
    return value * 2.0 if scale.search.may_double(value * 2.0 <= top) else value


def keep(scale: LossScale, at: float, used: torch.Tensor | None, *, tried: float) -> float:
    """Set the scale that a search has found, and return it. The next forward uses another tensor,
    which its own search may write to.

    Args:
        at: the largest scale at which the gradients fitted.
        used: what their forward multiplied by; None: a whole step has been tried.
        tried: the scale at which the search began.
    """
    known = _known(scale)
    if scale.fitting:
        value = min(INIT_SCALE, max(at / HEADROOM, scale.min_scale))
        value = min(value, known) if scale.search.found else value
        text = "the first backward found the loss scale %(scale)g"
        logs.event("scale", logging.INFO, "found", text, scale=value)
    else:
        value = at if at == tried == known * 2.0 else min(at, known)
    scale.search.innocent = None
    if scale.fitting or value != scale.value:
        scale.live.start_at(value, found=scale.fitting)
    scale.live.forget_tensors()
    scale.live.moves += 1
    scale.search.find(used, overflowed=at < tried)
    return value


def give_up(scale: LossScale, used: torch.Tensor, *, hopeless: bool) -> None:
    """A backward overflowed at every scale, so its gradients are multiplied by what its forward
    used. The next forward uses another tensor, which a search may write to. See `Search.fail`.
    """
    if hopeless and scale.search.innocent is None:
        scale.search.innocent = scale.value
    scale.search.fail(used, hopeless=hopeless)
    scale.live.forget_tensors()
    scale.live.moves += 1
    text = "the search for a loss scale failed: gradients overflow at every scale"
    logs.event("scale", logging.INFO, "not_found", text, hopeless=hopeless)


def _known(scale: LossScale) -> float:
    """The scale, as it was before steps were skipped for which it was not to blame."""
    return max(scale.value, scale.search.innocent or 0.0)
