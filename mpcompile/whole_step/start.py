"""The start of a loss scale, found before the first training step runs as a whole.

As in pieces (`scaling/fit_scale.py`), the start is the largest power of two that leaves room for
gradients eight times as large. Forward and backward run op by op on copies of what they write to,
with ever smaller scales, until no gradient overflows; no optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..devices.generators import unchanged
from ..scaling.loss_scale import LossScale
from ..torch_inside.amp import autocast_off
from .program import Program


def find_start(program: Program, scales: Sequence[LossScale], given: Sequence[Any]) -> None:
    """Find the starts of these loss scales, with the inputs of the first step.

    Args:
        program: the training step.
        scales: those whose start is still to be found, or which have skipped a step.
        given: Dynamo's inputs.
    """
    first = {scale: scale.search.first_tried() for scale in scales}
    tried = dict(first)
    devices = {x.device for x in given if isinstance(x, torch.Tensor)}
    while True:
        with unchanged(devices), autocast_off():
            overflowed, hopeless = program.try_scales(given, tried)
        too_large = [scale for scale in scales if scale in overflowed]
        if not too_large or hopeless:
            break
        if any(tried[scale] * 0.5 < scale.min_scale for scale in too_large):
            break
        tried.update({scale: tried[scale] * 0.5 for scale in too_large})
    for scale, at in tried.items():
        if hopeless or scale in too_large:
            scale.search.give_up(torch.tensor(scale.value), hopeless=hopeless)
        else:
            scale.search.keep(at, None, tried=first[scale])
            scale.search.end(settle=False)
