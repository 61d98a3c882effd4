"""Shows what the compiler did: the plan of a whole model, of which each graph's is a part.

A plan is plain data without a reference to a graph:

    rewritten graph --plan_of--> GraphPlan -+-> Plan          fields in `planner/plan_data.py`
    either --parts: text and Grids--> print, rich.print       `planner/plan_text.py`, `diff.py`
           --html, page.html--> one HTML file                 `page/`
           --to_dict--> JSON --from_dict--> the same plan     `mpcompile/stored.py`

The report of a `diagnose` is shown by the same parts, page and JSON.
"""

from ..planner.graph_plan import GraphPlan
from ..planner.plan_data import PlanNode
from .model_plan import Plan

__all__ = ["GraphPlan", "Plan", "PlanNode"]
