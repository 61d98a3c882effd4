"""The nodes of a plan as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable

from .graph_data import PlanNode
from .grid import ADDED, STYLES, Grid

HEADS = ("node", "op", "before -> after", "runs in", "rule", "module", "source", "reason")


def node_grid(nodes: Iterable[PlanNode], dtype: str) -> Grid:
    """One row for each node of a plan whose low dtype is `dtype`, "float16"."""
    grid = Grid(HEADS)
    for node in nodes:
        how = runs_in(node, dtype)
        what = (how, node.rule, node.module, node.source, node.reason)
        grid.add(node.name, short(node.op), types(node), *what, style=style(node))
    return grid


def runs_in(node: PlanNode, dtype: str) -> str:
    """The precision of a node in words, "FP16", in a plan whose low dtype is `dtype`."""
    low = dtype_word(node.low or dtype)
    return {"LOW": low, "FULL": "FP32", "KEEP": "as is"}.get(node.precision, node.precision)


def dtype_word(dtype: str) -> str:
    """`"bfloat16"` -> `"BF16"`."""
    return dtype.replace("bfloat", "BF").replace("float", "FP")


def types(node: PlanNode) -> str:
    """`"f32[8, 4] -> f16[8, 4]"`, or one type if they are the same."""
    if node.captured == node.planned or node.is_added:
        return node.planned
    return f"{node.captured} -> {node.planned}"


def style(node: PlanNode) -> str:
    return ADDED if node.is_added else STYLES.get(node.precision, "")


def short(op: str) -> str:
    """`"aten::linear"` -> `"linear"`, as in the lines of a graph."""
    return op.removeprefix("aten::")
