"""Shows what the compiler did: the plan of each graph and of a whole model, and what it writes.

A plan is plain data without a reference to a graph:

    rewritten graph --plan_of--> GraphPlan -+-> Plan          fields in `plan_data.py`
    either --parts: text and Grids--> print, rich.print       `plan_text.py`, `why.py`, `diff.py`
           --html, page.html--> one HTML file                 `page/`
           --to_dict--> JSON --from_dict--> the same plan     `mpcompile/stored.py`
    a compile writes its dump, torch's trace and the log      `compile_log.py`

The report of a `diagnose` is shown by the same parts, page and JSON.
"""

from .graph_plan import GraphPlan, PlanNode
from .model_plan import Plan

__all__ = ["GraphPlan", "Plan", "PlanNode"]
