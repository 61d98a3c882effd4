"""Says what it would take to change the precision of a node."""

from __future__ import annotations

from .graph_plan import PlanNode


def how_to_change(node: PlanNode) -> str:
    """One sentence, with the policy that would do it."""
    if node.is_added:
        return "It follows from the precision of the nodes that it connects: change those."
    other = "fp32" if node.precision == "LOW" else "low"
    return f'Policy(nodes={{"{node.name}": "{other}"}}) asks for the other precision.'
