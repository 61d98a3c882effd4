"""Which node went wrong first, and which nodes to keep in FP32 so that it doesn't.

OVERFLOW    a value is not finite, and is in FP32
BACKWARD    a gradient is not finite, and is in FP32
OWN         a value or gradient is not finite, and isn't in FP32 either: no pin helps
UNDERFLOW   a gradient has become zero
INACCURATE  a value is far off, though what it was computed from is not
"""

from __future__ import annotations

from torch import fx

from ..plans.graph_plan import GraphPlan
from . import backward_faults, forward_faults
from .case import Case
from .fault import Fault, Runs

__all__ = ["find"]


def find(graph: fx.Graph, plan: GraphPlan, runs: Runs) -> list[Fault]:
    """What went wrong in one run of a graph, most serious first.

    What came into the graph wrong already is no fault of this graph: not the infinite inputs that
    an earlier graph made, nor the infinite gradients of a later one or of the loss.

    Args:
        graph: the rewritten graph, before checkpoints are folded back.
        plan: its plan.
        runs: what was recorded.
    """
    case = Case(graph, plan, runs)
    far_off = list(forward_faults.inaccurate(case))
    found = forward_faults.overflow(case) or forward_faults.own(case)
    found = found or backward_faults.overflow(case)
    return [found, *far_off] if found else [*far_off, *backward_faults.underflow(case)]
