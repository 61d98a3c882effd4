"""Reports made by hand."""

from typing import Any

from mpcompile.diagnosis.report import NodeNumbers, Report, UpdateErrors
from mpcompile.observe.fault import Fault, FaultKind
from mpcompile.observe.record import EXPONENTS, Numbers, Shares
from mpcompile.planner.graph_plan import GraphPlan
from mpcompile.planner.plan_data import PlanNode

EVIL = "</script><img src=x onerror=alert(1)>"


def node(name: str, **fields: Any) -> PlanNode:
    """A line of a plan."""
    given = {
        "op": "aten::exp", "module": "", "source": "", "captured": "f32[2]", "planned": "f16[2]",
        "precision": "LOW", "rule": "plan", "reason": "it is cheap",
    }  # fmt: skip
    return PlanNode(name=name, **{**given, **fields})


def numbers(of: PlanNode, **fields: Any) -> NodeNumbers:
    """The numbers of a node with nothing wrong."""
    given = {
        "graph": 0, "node": of, "value": Numbers(4, amax=2.0, amin=1.0), "gradient": Numbers(4),
        "error": None, "error_fp32": None, "gradient_error": None, "shares": None,
        "gradient_shares": None, "lost": 0.0,
    }  # fmt: skip
    return NodeNumbers(**{**given, **fields})


def report(**fields: Any) -> Report:
    """A report of a model with nothing wrong and no nodes."""
    given = {
        "model": "Net", "level": "O1", "dtype": "float16", "device": "cpu", "faults": (),
        "losses": {"low": 1.5, "fp32": 1.25, "fp64": 1.25}, "scale": 1024.0,
        "suggested_scale": 4096.0, "nodes": (), "histogram": histogram({}), "zeros": 0,
        "updates": (), "optimizer": "AdamW", "graphs": (), "notes": (),
    }  # fmt: skip
    return Report(**{**given, **fields})


def histogram(counts: dict[int, int]) -> tuple[int, ...]:
    """Elements by binary exponent."""
    return tuple(counts.get(exponent, 0) for exponent in EXPONENTS)


def faulty(text: str = "") -> Report:
    """A report with everything in it; `text` stands at the end of everything that is text."""
    line = node(
        f"linear_1{text}", op=f"aten::linear{text}", module=f"blocks.2.down{text}",
        source=f"net.py:7{text}", frames=(f"net.py:30{text}", f"net.py:7{text}"),
        reason=f"a product{text}",
    )  # fmt: skip
    other = node(f"exp{text}", module=f"blocks.2{text}", source=f"net.py:8{text}")
    fault = Fault(
        FaultKind.OVERFLOW, line, f"its result doesn't fit float16{text}", 70000.0, (line.name,)
    )
    return report(
        model=f"Net{text}",
        faults=(fault,),
        losses={"low": float("nan"), "fp32": 1.25, "fp64": 1.25},
        nodes=(
            numbers(
                other, error=1e-3, error_fp32=1e-7, gradient_error=0.5, lost=0.25,
                shares=Shares(0.5, count=100), gradient_shares=Shares(0.25, 0.5, count=8),
            ),
            numbers(
                line, value=Numbers(400, infs=3, amax=65504.0, amin=0.5), error=0.125,
                shares=Shares(0.0, 0.1, 0.2, count=300),
            ),
        ),
        histogram=histogram({-40: 10, -20: 20, 0: 30, 10: 10}),
        zeros=30,
        updates=(UpdateErrors(f"bias{text}", 0.5, 0.0), UpdateErrors(f"weight{text}", 1e-5, 0.75)),
        graphs=(GraphPlan("O1", "float16", "cpu", (other, line)),),
        notes=(f"one thing could not be found out{text}",),
    )  # fmt: skip
