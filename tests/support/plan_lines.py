"""A plan line by line, to be compared to the letter."""

from mpcompile.plans.graph_plan import GraphPlan


def lines_of(plan: GraphPlan) -> list[str]:
    """Every node, cast, pad, reason and product of a graph."""
    nodes = (f"{n.name}: {n.planned} {n.precision} {n.reason} ({n.module})" for n in plan.nodes)
    return [plan.head(), *nodes, *str(plan.tensor_cores).splitlines()]
