"""The line that is logged for each graph."""

from __future__ import annotations

import logging

from .. import logs
from .graph_plan import GraphPlan


def log_graph(plan: GraphPlan, seconds: float) -> None:
    """Log what became of one graph.

    Args:
        seconds: wall time of the whole compile of this graph.
    """
    if plan.left is not None:
        logs.event(
            "fallback", logging.INFO, "left",
            "a graph on %(device)s stays in FP32: %(reason)s",
            device=plan.device, reason=plan.left, seconds=seconds,
        )  # fmt: skip
        return
    operators = {"LOW": 0, "FULL": 0, "KEEP": 0, **plan.counts()}
    capture = plan.seconds["capture"]
    logs.event(
        "compile", logging.INFO, "graph",
        "a graph at %(level)s in %(dtype)s on %(device)s: %(nodes)d operators, %(low)d low, "
        "%(casts)d casts; %(share).3f of the FLOPs of products can run on Tensor Cores; compiled "
        "in %(seconds).2f s (capture %(capture_seconds).2f, passes %(passes_seconds).2f)",
        level=plan.level, dtype=plan.dtype, device=plan.device,
        nodes=sum(operators.values()), low=operators["LOW"], full=operators["FULL"],
        kept=operators["KEEP"], casts=plan.casts, scaled=plan.scaled,
        share=plan.tensor_cores.share, seconds=seconds, capture_seconds=capture,
        passes_seconds=sum(plan.seconds.values()) - capture,
    )  # fmt: skip
