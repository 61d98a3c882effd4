"""What the scripts of the page read: the plan as data for JSON."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..change import how_to_change
from ..graph_plan import BackwardNode, GraphPlan, Line, PlanNode

if TYPE_CHECKING:
    from ..plan import Plan


def data_of(plan: Plan) -> dict[str, Any]:
    """The graphs, and the tree of modules."""
    return {
        "low": dtype_word(plan.dtype),
        "graphs": [_graph(graph) for graph in plan.graphs],
        "modules": list(_modules(plan)),
    }


def dtype_word(dtype: str) -> str:
    """`"bfloat16"` -> `"BF16"`."""
    return dtype.replace("bfloat", "BF").replace("float", "FP")


def _graph(graph: GraphPlan) -> dict[str, Any]:
    products = {op.name: dataclasses.asdict(op) for op in graph.tensor_cores.ops}
    return {
        "left": graph.left,
        "ends_with": graph.ends_with,
        "nodes": [
            {
                **dataclasses.asdict(node),
                "captured": node.captured if _is_captured(node) else None,
                "added": node.is_added,
                "change": how_to_change(node),
                "product": products.get(node.name),
            }
            for node in graph.nodes
        ],
        "before": [[line.name, line.text] for line in graph.before],
        "after": [[line.name, line.text, line.reads] for line in graph.after],
        "rows": list(aligned(graph.before, graph.after)),
        "backward": [
            {**dataclasses.asdict(node), "precision": _precision(node)} for node in graph.backward
        ],
    }


def _is_captured(node: PlanNode) -> bool:
    """Whether the FP32 program has the node: what a pass made has a result of type None there."""
    return not node.is_added and node.captured != type(None).__name__


def aligned(
    before: Sequence[Line], after: Sequence[Line]
) -> Iterator[tuple[int | None, int | None]]:
    """The lines side by side: pairs of positions, None where a side has no such node.

    A node that a pass has moved past another one stands in two rows, removed and added.
    """
    names = [line.name for line in before], [line.name for line in after]
    blocks = difflib.SequenceMatcher(None, *names, autojunk=False).get_matching_blocks()
    i = j = 0
    for block in blocks:
        yield from ((k, None) for k in range(i, block.a))
        yield from ((None, k) for k in range(j, block.b))
        yield from ((block.a + k, block.b + k) for k in range(block.size))
        i, j = block.a + block.size, block.b + block.size


def _precision(node: BackwardNode) -> str:
    """A backward node is coloured by the dtype of its result."""
    return precision_of_dtype(node.result.lstrip("(").partition("[")[0])


def precision_of_dtype(short: str) -> str:
    """Short name of a dtype -> the precision whose colour shows it."""
    return {"f16": "LOW", "bf16": "LOW", "f32": "FULL"}.get(short, "KEEP")


def _modules(plan: Plan) -> Iterator[dict[str, Any]]:
    """The modules from the root down, each before its children, with the nodes in and below it."""
    kinds = {"": plan.model} | {module.path: module.kind for module in plan.modules}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for node in plan.nodes:
        for path in _with_parents(node.module):
            kinds.setdefault(path, "")
            if not node.is_added:
                counts[path][node.precision] += 1
    children: dict[str, list[str]] = defaultdict(list)
    for path in kinds:
        if path:
            children[_parent(path)].append(path)
    todo = [""]
    while todo:
        path = todo.pop()
        todo += reversed(children[path])
        yield {
            "path": path,
            "kind": kinds[path],
            "counts": counts[path],
            "parent": bool(children[path]),
        }


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _with_parents(path: str) -> list[str]:
    """`"a.b"` -> `["", "a", "a.b"]`."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]
