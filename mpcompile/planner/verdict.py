"""Why a product stays in FP32 that a rule would run low: both sides of the sum, in words.

    but FP32 costs less: estimated 0.0335 ms, low 0.0168 ms and 0.0921 ms for the casts it needs;
    from about 8 times the batch on, low pays (device profile)

The casts are those at the product itself, while its neighbours stay as they were decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from .constraints import Item
from .min_cut import NEVER
from .objective import DOUBT, UNIT, Objective
from .times import seconds

_MOST = 1024  # times the batch


@dataclass(frozen=True)
class Side:
    """What a product costs in one precision, in sixteenths of a byte.

    Attributes:
        time: of the product itself.
        fixed: what doesn't grow with the batch: casts of weights, launches of casts.
        growing: what does: casts, and values that are stored.
    """

    time: int
    fixed: int
    growing: int

    @property
    def more(self) -> int:
        return self.fixed + self.growing


def verdict(objective: Objective, node: fx.Node, best: Mapping[Item, bool]) -> str:
    """Why a product with predicted times is FULL where `best` says which items are LOW."""
    low, full = _sides(objective, node, best)
    if low.time >= full.time:
        why, casts = "FP32 is faster", ""
    else:
        sure = low.time + low.more >= full.time + full.more
        why = (
            "FP32 costs less" if sure else f"low saves less than a prediction is off by, 1/{DOUBT}"
        )
        casts = f" and {_ms(objective, low.more)} ms for the casts it needs" if low.more else ""
    wider = bool(casts) and full.more * 100 > full.time  # else nobody would see it
    there = f" and {_ms(objective, full.more)} ms for wider values" if wider else ""
    times = _ms(objective, full.time), _ms(objective, low.time)
    pays = _pays_from(objective, node, low, full)
    when = f"; from about {pays} times the batch on, low pays" if pays else ""
    return f"{why}: estimated {times[0]} ms{there}, low {times[1]} ms{casts}{when} (device profile)"


def _sides(objective: Objective, node: fx.Node, best: Mapping[Item, bool]) -> tuple[Side, Side]:
    costs = objective.terms[node]
    fixed, growing, wider = costs.low.get("weights", 0), 0, costs.full.get("stored", 0)
    for (operand, reader), (up, down) in objective.pairs.items():
        if node not in (operand, reader):
            continue
        other = reader if operand is node else operand
        other_low = best[other] if other in best else objective.constraints.is_low(other)
        if other_low:
            wider += down if operand is node else up
            continue
        cast = up if operand is node else down
        launch = objective.launch if cast >= objective.launch else 0
        if cast < NEVER:
            fixed, growing = fixed + launch, growing + cast - launch
    return (
        Side(costs.low["time"], fixed, growing),
        Side(costs.full["time"], 0, wider if wider < NEVER else 0),
    )


def _pays_from(objective: Objective, node: fx.Node, low: Side, full: Side) -> int | None:
    """How many times the batch makes it LOW, a power of two, as far as the profile says."""
    times = 2
    while times <= _MOST:
        found = seconds(node, objective.config, batches=times)
        if found is None:
            return None
        low_time, full_time = map(objective.as_bytes, found)
        casts = low.fixed + times * low.growing
        if low_time + low_time // DOUBT + casts < full_time + times * full.growing:
            return times
        times *= 2
    return None


def _ms(objective: Objective, cost: int) -> str:
    """A cost, as the time in which memory moves so many bytes."""
    assert objective.config.profile is not None
    return f"{cost / UNIT / objective.config.profile.bandwidth * 1e3:.3g}"
