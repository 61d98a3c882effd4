"""Someone else's mixed precision around a compiled model: a GradScaler, or autocast.

A framework brings them along when it is told to train in FP16 or BF16. Nobody is to get two loss
scales, or dtypes chosen twice, without a word:

* A GradScaler that steps an optimizer of scaled parameters: a warning at the first such step.
* A `forward` that was replaced, on the module, by one under autocast: refused. The region would
  cover the whole program, and what a program says about its dtypes counts more than our plan.
* Autocast around the call: off inside of it, and said once. So the program that is compiled is the
  one without it, and so are the dtypes of its results. A `torch.compile(backend="mpcompile")` is
  traced before we are called; there it is off inside the graph, and results have its dtype.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import logs
from ..devices import registry
from ..errors import MPCompileError, warn
from ..torch_inside.tensors import is_enabled
from . import parameters

_SCALERS_STEP = torch.amp.GradScaler.step.__code__


def look_for_scaler(optimizer: Optimizer) -> None:
    """Warn if a GradScaler is stepping this optimizer, whose gradients a loss scale of ours scales.
    Looks at the first step at which they are scaled.
    """
    state = parameters.of_optimizer(optimizer)
    if state.looked_for_scaler:
        return
    held = parameters.parameters_of(optimizer)
    if not any(scale.active for p in held for scale in parameters.scales_of(p)):
        return
    state.looked_for_scaler = True
    # Optimizers aren't told: only a fused one gets the scaler's tensors.
    frame = frame_of(_SCALERS_STEP)
    scaler: Any = None if frame is None else frame.f_locals.get("self")
    if scaler is not None and scaler.is_enabled():
        warn(
            f"a GradScaler steps {type(optimizer).__name__}, whose gradients mpcompile scales, "
            "unscales and checks: two loss scales, and an overflow skips a step under each. Leave "
            "the GradScaler out: loss.backward(), optimizer.step(). Or leave scaling to it: "
            'mpcompile(..., loss_scale="none")'
        )


def frame_of(code: CodeType) -> FrameType | None:
    """The innermost call of this code that is running, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def refuse_autocast_forward(module: nn.Module) -> None:
    """Refuse a module whose forward someone has replaced by one under autocast."""
    forward: Any = vars(module).get("forward")
    while forward is not None:
        for autocast in _autocasts(getattr(forward, "__func__", forward)):
            raise MPCompileError(
                f"the forward of this {type(module).__name__} was replaced by one under "
                f"autocast({autocast.fast_dtype}), which chooses dtypes, too: take it off. If that "
                'is Accelerate: Accelerator(mixed_precision="no"), TrainingArguments without bf16 '
                "and fp16, or MPCompileAccelerator or MPCompileTrainer of mpcompile.integrations"
            )
        forward = getattr(forward, "__wrapped__", None)


def _autocasts(function: Any) -> list[Any]:
    """The enabled autocasts that a function made by autocast's decorator enters."""
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [a for a in held if isinstance(a, torch.autocast) and is_enabled(a)]


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast is off, as Dynamo sees it, too; where it was on, this is said."""
    off = contextlib.ExitStack()
    for device in registry.supported():
        if torch.is_autocast_enabled(device):
            say_autocast(torch.get_autocast_dtype(device))
            off.enter_context(torch.autocast(device, enabled=False))
    return off


@functools.cache
def say_autocast(dtype: torch.dtype | None) -> None:
    """Say, once, that autocast is on around a call of what is compiled."""
    text = (
        "autocast(%(dtype)s) is on where a compiled model is called. It has no effect inside of "
        "it; leave it out, or keep it for what else runs under it"
    )
    logs.event("compile", logging.WARNING, "autocast", text, dtype=str(dtype))
