"""What a trace of torch's (`TORCH_TRACE=directory`) gets from mpcompile; `tlparse` shows it.

    mpcompile_captured     the graph as captured, in FP32
    mpcompile_rewritten    the graph after all passes, with the reason of each decision
    mpcompile_plan         the plan, as JSON; of a graph that was left in FP32, the reason
    mpcompile_step         the program of a compiled optimizer step

`trace_structured` calls the functions that make the texts only while a trace is written.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

from torch import fx

from .. import ir
from ..torch_inside.names import trace_structured
from ..torch_inside.private_names import MissingInTorch
from .graph_plan import GraphPlan


def trace_graph(plan: GraphPlan) -> None:
    """Add one graph to the trace."""
    if plan.left is None:
        _artifact("captured", lambda: "\n".join(line.text for line in plan.before))
        _artifact("rewritten", lambda: _with_reasons(plan))
    _artifact("plan", lambda: json.dumps(plan.to_dict(), indent=1), encoding="json")


def trace_step(gm: fx.GraphModule) -> None:
    """Add the program of an optimizer's step to the trace."""
    _artifact("step", lambda: ir.render(gm.graph, reasons=True))


def _artifact(name: str, text: Callable[[], str], *, encoding: str = "string") -> None:
    with contextlib.suppress(MissingInTorch):
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"mpcompile_{name}", "encoding": encoding},
            payload_fn=text,
            expect_trace_id=False,  # no compile of Dynamo's surrounds that of an optimizer's step
        )


def _with_reasons(plan: GraphPlan) -> str:
    nodes = {node.name: node for node in plan.nodes}
    lines = []
    for line in plan.after:
        node = nodes.get(line.name)
        lines.append(
            line.text
            if node is None
            else ir.with_reason(
                line.text, node.precision, node.reason, node.rule, node.module, node.source
            )
        )
    return "\n".join(lines)
