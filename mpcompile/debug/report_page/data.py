"""What the scripts of the page read: the numbers of nodes and parameters as data for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...inspect.page.data import dtype_word

if TYPE_CHECKING:
    from ..report import Report

# Of a node's line in the plan.
_FACTS = (
    "name",
    "op",
    "module",
    "source",
    "frames",
    "captured",
    "planned",
    "precision",
    "rule",
    "reason",
)


def data_of(report: Report) -> dict[str, Any]:
    """The nodes, each with its line in the plan, and the parameters."""
    data = report.to_dict()
    nodes = [
        {
            **numbers,
            **{fact: getattr(n.node, fact) for fact in _FACTS},
            "added": n.node.is_added,
            "faults": [
                f"{fault.kind.value}: {fault.reason}"
                for fault in report.faults
                if (fault.graph, fault.node.name) == (n.graph, n.node.name)
            ],
        }
        for numbers, n in zip(data["nodes"], report.nodes, strict=True)
    ]
    return {
        "low": dtype_word(report.dtype),
        "graphs": len(report.graphs),
        "nodes": nodes,
        "updates": data["updates"],
    }
