"""Shows what the compiler did: the plan of each graph and of a whole model, and dumps on disk.

A plan is plain data without a reference to a graph: it can be printed, compared, stored as JSON,
and made into a page for a browser. `graph_plan.plan_of` reads one off a rewritten graph.
"""

from .graph_plan import GraphPlan, PlanNode
from .plan import Plan

__all__ = ["GraphPlan", "Plan", "PlanNode"]
