"""Warn of weights that are stored in a half dtype and updated without FP32 masters.

BF16 has eight significant bits: an update of less than 0.2% of a weight rounds to nothing, so at
the learning rates of fine-tuning most weights never move. An `MPOptimizer` keeps masters. Of other
optimizers, those of torch are known not to; what a library's own do, nobody here knows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import warn
from ..ir.dtypes import HALF
from ..scaling import hooks, parameters


def reached(inputs: Iterable[Any]) -> None:
    """A graph was compiled with these inputs."""
    if not torch.is_grad_enabled():
        return
    for x in inputs:
        if isinstance(x, nn.Parameter) and x.dtype in HALF and x.requires_grad:
            hooks.look_before_steps(_look)
            parameters.note(x, has_half_graph=True)


def _look(optimizer: Optimizer) -> None:
    """An optimizer is about to step."""
    state = parameters.of_optimizer(optimizer)
    if state.looked_for_masters >= parameters.changes() or state.skips_by_itself:
        return
    state.looked_for_masters = parameters.changes()
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    held = parameters.parameters_of(optimizer)
    if low := [p for p in held if parameters.state_of(p).has_half_graph and p.dtype in HALF]:
        state.looked_for_masters = sys.maxsize
        name, dtype = type(optimizer).__name__, str(low[0].dtype).removeprefix("torch.")
        warn(
            f"mpcompile: {name} updates weights that are stored in {dtype} (one of shape "
            f"{tuple(low[0].shape)}), without FP32 masters: an update of less than 0.2% of a "
            f"weight is lost. Use MPOptimizer({name}(...)), which keeps masters, or call "
            "model.float() before"
        )
