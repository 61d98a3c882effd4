"""Plans made by hand, for tests of what is done with plans; and how much work that is, counted."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from mpcompile.planner.plan_data import Line, ModuleLine
from mpcompile.plans import GraphPlan, Plan, PlanNode


def node(name: str, **facts: Any) -> PlanNode:
    """A linear in "fc" that runs low by the table; `facts` replace parts of it."""
    usual = {
        "op": "aten::linear", "module": "fc", "source": "net.py:7", "captured": "f32[8, 4]",
        "planned": "f16[8, 4]", "precision": "LOW", "rule": "table", "reason": "matrix product",
    }  # fmt: skip
    return PlanNode(name=name, **{**usual, **facts})


def cast(name: str, of: str, **facts: Any) -> PlanNode:
    """A cast of the value `of`."""
    usual = {"op": "aten::to", "precision": "KEEP", "rule": "cast", "reason": "fc reads f16"}
    return node(name, **{**usual, "reads": (of,), **facts})


def graph(*nodes: PlanNode, **facts: Any) -> GraphPlan:
    """A graph of these nodes, with a line for each before (of the program's) and after."""
    program = [n for n in nodes if not n.is_added]
    lines = {
        "before": tuple(Line(n.name, f"{n.name}: {n.captured} = before()") for n in program),
        "after": tuple(Line(n.name, f"{n.name}: {n.planned} = after()") for n in nodes),
    }
    return GraphPlan("O1", "float16", "cpu", nodes, **{**lines, **facts})


def plan(*graphs: GraphPlan, **facts: Any) -> Plan:
    """A plan of these graphs, of a model with one module."""
    modules = (ModuleLine("", "Net"), ModuleLine("fc", "Linear"))
    return Plan("Net", "O1", "float16", "cpu", graphs, **{"modules": modules, **facts})


def large(count: int = 3000) -> Plan:
    """A plan of as many nodes as a transformer of 24 layers has, each third one a cast."""
    nodes = []
    for i in range(count):
        where = {"module": f"blocks.{i // 125}.attn", "reason": "a sentence of some length " * 3}
        if i % 3:
            nodes.append(node(f"linear_{i}", reads=(f"x_{i - 1}",), **where))
        else:
            nodes.append(cast(f"x_{i}", f"linear_{i - 1}", **where))
    return plan(graph(*nodes))


def lines_run(function: Callable[[], object]) -> int:
    """How many lines of Python run while `function` does. (A time would be one of the machine's
    other work, too.)
    """
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
