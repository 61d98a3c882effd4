"""The run of the rewritten graphs, at the loss scale that a training would have there."""

from __future__ import annotations

import math

import torch

from .. import ir
from ..ir.scale import INIT_SCALE, ScaleRule
from ..observe.compared import gradient_units, source_of_value
from ..observe.numbers import Numbers
from ..settings import Settings
from .sides import Run, Side, Sides

__all__ = ["low_dtype_of", "run_low"]

# By how much the scale is lowered until no gradient overflows. A training halves it.
BACKOFF = 16


def low_dtype_of(sides: Sides) -> torch.dtype:
    """The low dtype of the graphs; FP32 if all were left."""
    names = [graph.plan.dtype for graph in sides.graphs if graph.plan.left is None]
    low: torch.dtype = getattr(torch, names[0]) if names else torch.float32
    return low


def run_low(
    sides: Sides, full: Run, exact: Run | None, live: float | None
) -> tuple[Run, float | None]:
    """Run the low side, and find the largest power of two by which its gradients can be multiplied.

    Args:
        sides: their `scale` is set to that of the run.
        full, exact: the runs in FP32 and FP64; None if there is none in FP64.
        live: the loss scale at which the model trains, or None: it hasn't begun.

    Returns:
        The run, and that power of two; None for BF16, and where there are no gradients.
    """
    reference = exact or full
    if low_dtype_of(sides) is not torch.float16:
        sides.scale = _scale(sides.settings, live, None)
        return sides.run(Side.LOW, reference), None
    fits = _fitting(_largest(reference, low=False))
    sides.scale = _scale(sides.settings, live, fits)
    low = sides.run(Side.LOW, reference)
    # Terms of a gradient may be larger than their sum: go down as a training does.
    rule = _rule(sides.settings)
    curable = rule.dynamic and math.isfinite(low.loss) and not _overflowed(full)
    while curable and _overflowed(low) and sides.scale > rule.min_scale:
        sides.scale = max(rule.min_scale, sides.scale / BACKOFF)
        low = sides.run(Side.LOW, reference)
    if _overflowed(low):
        return low, fits
    # The exact gradient of a value counts its readers in FP32, too: the scale may be too low.
    fits = _fitting(_largest(low, low=True) / sides.scale)
    before, sides.scale = sides.scale, _scale(sides.settings, live, fits)
    if sides.scale == before:
        return low, fits
    better = sides.run(Side.LOW, reference)
    if _overflowed(better):  # what was too small to be seen before
        sides.scale = before
        return low, before
    return better, fits


def _largest(run: Run, *, low: bool) -> float:
    """The largest gradient of a value that the rewritten graph stores in FP16 and scales: as the
    low side has it, or as another side has that of the program's value.
    """
    sizes = [0.0]
    for graph, record in run.calls:
        units = gradient_units(graph.rewritten.graph)
        for n, scaled in units.items():
            value = ir.tensor(n)
            if value is not None and value.dtype is torch.float16:
                name = n.name if low else source_of_value(n).name
                if scaled or not low:
                    sizes.append(record.gradients.get(name, Numbers()).amax)
    return max(sizes)


def _overflowed(run: Run) -> bool:
    return any(n.bad for _, record in run.calls for n in record.gradients.values())


def _fitting(largest: float) -> float | None:
    """The largest power of two that keeps a gradient below the end of FP16."""
    if not largest:
        return None
    return float(2.0 ** (math.ceil(math.log2(torch.finfo(torch.float16).max / largest)) - 1))


def _rule(settings: Settings) -> ScaleRule:
    return settings.loss_scale.rule if settings.loss_scale is not None else ScaleRule()


def _scale(settings: Settings, live: float | None, fits: float | None) -> float:
    """What a training at this point would scale by."""
    given, rule = settings.loss_scale, _rule(settings)
    if given is not None and not given.active:
        return 1.0
    if given is not None and not rule.dynamic:
        return given.value
    start = live or (INIT_SCALE if given is None or given.fitting else given.value)
    return max(rule.min_scale, min(start, start if fits is None else fits))
