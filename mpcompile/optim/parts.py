"""What belongs to the step of an optimizer, of torch's or an MPOptimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.optim import Optimizer

from ..state.loss_scale import LossScale
from .optimizer import MPOptimizer
from .results import Results
from .watch import Watch


@dataclass(frozen=True)
class StepParts:
    """Attributes:
    optimizer: whose step is traced: of an MPOptimizer, the one that it wraps.
    max_grad_norm: clip the global 2-norm of the gradients to this, or None.
    own: the loss scale of parameters that no scaled model reads, or None: they are not checked.
    results: where the step reports.
    watch: is told of each step.
    dump: directory for the graph of the step after every pass, or None.
    is_connected: whether other processes hold parts of the parameters.
    """

    optimizer: Optimizer
    max_grad_norm: float | None
    own: LossScale | None
    results: Results
    watch: Watch
    dump: Path | None
    is_connected: bool


def parts_of(optimizer: Optimizer) -> StepParts:
    """The parts of an optimizer's step."""
    if not isinstance(optimizer, MPOptimizer):
        return StepParts(optimizer, None, None, Results(), Watch(), None, False)
    return StepParts(
        optimizer.inner,
        optimizer._max_grad_norm,
        optimizer._own_scale,
        optimizer._results,
        optimizer._watch,
        optimizer._dump,
        optimizer._connected is not None,
    )
