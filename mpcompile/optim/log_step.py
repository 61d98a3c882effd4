"""The lines that are logged where an optimizer's step is compiled."""

from __future__ import annotations

import logging
from collections.abc import Collection

from torch.optim import Optimizer

from .. import logs
from .key import StepKey
from .step import CompiledStep


def why_compiled(
    optimizer: Optimizer, step: CompiledStep | None, others: Collection[CompiledStep]
) -> str:
    """Why a step is to be compiled.

    Args:
        step: the one that was compiled for this key and no longer holds, or None.
        others: those of all keys.
    """
    if step is not None:
        return step.rests_on.broken_by(optimizer) or "its state is stored in another way"
    if others:
        return "gradients, parameters or loss scales for which none was compiled yet"
    return "none was compiled yet, or a state was loaded"


def log_compiled(optimizer: Optimizer, key: StepKey, why: str, seconds: float) -> None:
    logs.event(
        "optim", logging.INFO, "compiled",
        "a step of %(optimizer)s over %(parameters)d parameters was compiled in %(seconds).2f s: "
        "%(why)s",
        optimizer=type(optimizer).__name__, parameters=len(key.members), why=why, seconds=seconds,
    )  # fmt: skip


def log_by_operator(optimizer: Optimizer, key: StepKey) -> None:
    logs.event(
        "optim", logging.INFO, "by_operator",
        "a step of %(optimizer)s over %(parameters)d parameters runs operator by operator, because "
        "it makes the optimizer's state; the next one is compiled",
        optimizer=type(optimizer).__name__, parameters=len(key.members),
    )  # fmt: skip
