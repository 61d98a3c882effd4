"""Shows what the compiler did: the plan of each graph, and its dump on disk."""

from .plan import Plan, PlanNode

__all__ = ["Plan", "PlanNode"]
