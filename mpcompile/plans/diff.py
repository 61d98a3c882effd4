"""What differs between two plans: of two levels, policies, devices or versions.

Nodes are matched graph by graph: by name, where operator and module agree; what is left by its
place among nodes of the same operator and module, since a pass that adds or removes a node shifts
the names after it; the rest by name and operator alone (a module was renamed). Casts and pads are
matched by what they read: their names hold dtypes.

Compared are precision, rule and planned type. Times, reasons and source lines are not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MPCompileError
from ..planner import plan_text
from ..planner.grid import Grid, Part, Shown
from ..planner.plan_data import GraphData, PlanData, PlanNode
from ..planner.plan_text import short, style


@dataclass(frozen=True)
class NodeDiff:
    """A node that differs, or that one plan alone has.

    Attributes:
        graph: the number of its graph.
        first, second: the node in either plan; None: it is not in that one.
    """

    graph: int
    first: PlanNode | None
    second: PlanNode | None


@dataclass(frozen=True)
class PlanDiff(Shown):
    """What differs between two plans; false if nothing does.

    Attributes:
        facts: what differs in the plans as wholes: "level", "torch", "graph 1", ... -> the two.
        nodes: the nodes that differ, then those that one plan alone has, graph by graph.
        totals: "casts", "saved bytes", ... -> the two, also where they are equal.
    """

    facts: dict[str, tuple[str, str]]
    nodes: tuple[NodeDiff, ...]
    totals: dict[str, tuple[str, str]]

    @property
    def changed(self) -> tuple[NodeDiff, ...]:
        """The nodes of both plans that differ."""
        return tuple(one for one in self.nodes if one.first and one.second)

    @property
    def alone(self) -> tuple[NodeDiff, ...]:
        """The nodes that one plan alone has."""
        return tuple(one for one in self.nodes if not (one.first and one.second))

    def __bool__(self) -> bool:
        return bool(self.facts or self.nodes or any(a != b for a, b in self.totals.values()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def _parts(self) -> Iterator[Part]:
        if not self:
            yield "the plans are equal"
            return
        if self.facts:
            yield _side_by_side("what differs", self.facts)
        if self.nodes:
            counts = f"nodes: {len(self.changed)} differ, {len(self.alone)} are in one plan alone"
            yield f"{counts}\n" if not self.facts else f"\n{counts}"
            yield _table(self.nodes)
        yield ""
        yield _side_by_side("totals", self.totals)


def difference(first: PlanData, second: PlanData) -> PlanDiff:
    """Compare two plans.

    Raises:
        MPCompileError: the second is no Plan.
    """
    if type(second) is not type(first):
        raise MPCompileError(f"a Plan is compared with a Plan, not with a {type(second).__name__}")
    pairs = itertools.zip_longest(first.graphs, second.graphs)
    nodes = [one for number, (a, b) in enumerate(pairs) for one in _nodes(number, a, b)]
    facts = {name: (a, b) for name, (a, b) in _both(first, second, _whole).items() if a != b}
    return PlanDiff(facts, tuple(nodes), _both(first, second, _counted))


def _both(
    first: PlanData, second: PlanData, read: Callable[[PlanData], dict[str, str]]
) -> dict[str, tuple[str, str]]:
    a, b = read(first), read(second)
    return {name: (a.get(name, "-"), b.get(name, "-")) for name in {**a, **b}}


def _whole(plan: PlanData) -> dict[str, str]:
    return {
        "model": plan.model,
        "level": plan.level,
        "dtype": plan.dtype,
        "device": plan.device,
        "GPU": plan.gpu.name if plan.gpu is not None else "-",
        **plan.versions,
        "repairs": "; ".join(plan.repairs),
        **{f"graph {number}": _outline(graph) for number, graph in enumerate(plan.graphs)},
    }


def _outline(graph: GraphData) -> str:
    """What becomes of a graph as a whole."""
    if graph.left is not None:
        return f"left in FP32: {graph.left}"
    ends = f", ends with a graph break: {graph.ends_with}" if graph.ends_with else ""
    return f"rewritten, gradients {'scaled' if graph.scaled else 'not scaled'}{ends}"


def _counted(plan: PlanData) -> dict[str, str]:
    of = [node.precision for node in plan.nodes if not node.is_added]
    shares = plan.tensor_cores
    return {
        "graphs": str(len(plan.graphs)),
        "graphs left in FP32": str(len(plan.left)),
        "graph breaks": str(len(plan.breaks)),
        "product FLOPs in graphs": f"{plan.share_in_graphs:.1%}",
        **{f"operators {name}": str(of.count(name)) for name in ("LOW", "FULL", "KEEP")},
        "casts": str(plan.casts),
        "Tensor Core share as captured": f"{shares.share_before:.1%}",
        "Tensor Core share": f"{shares.share:.1%}",
        "saved bytes": f"{plan.saved_bytes:,}",
        **{f"saved bytes in {d}": f"{n:,}" for d, n in plan_text.bytes_by_dtype(plan).items()},
        "operators of the backward": str(sum(len(graph.backward) for graph in plan.graphs)),
    }


# -- nodes -----------------------------------------------------------------------------------------


def _nodes(number: int, first: GraphData | None, second: GraphData | None) -> Iterator[NodeDiff]:
    a = first.nodes if first is not None else ()
    b = second.nodes if second is not None else ()
    partner = _matched(a, b)
    taken = set(partner.values())
    both = [(node, b[partner[i]]) for i, node in enumerate(a) if i in partner]
    yield from (NodeDiff(number, x, y) for x, y in both if _decision(x) != _decision(y))
    yield from (NodeDiff(number, node, None) for i, node in enumerate(a) if i not in partner)
    yield from (NodeDiff(number, None, node) for j, node in enumerate(b) if j not in taken)


def _decision(node: PlanNode) -> tuple[str, ...]:
    return node.precision, node.rule, node.planned


def _matched(a: Sequence[PlanNode], b: Sequence[PlanNode]) -> dict[int, int]:
    """Place in `a` -> place in `b` of the same node."""
    partner: dict[int, int] = {}
    keys: tuple[Callable[[PlanNode], Hashable], ...] = (
        lambda n: (n.name, n.module, n.op), lambda n: (n.module, n.op), lambda n: (n.name, n.op),
    )  # fmt: skip
    for key in keys:
        taken, places = {*partner.values()}, defaultdict[Hashable, list[int]](list)
        for j, node in enumerate(b):
            if j not in taken and not node.is_added:
                places[key(node)].append(j)
        for i, node in enumerate(a):
            if i not in partner and not node.is_added and places[key(node)]:
                partner[i] = places[key(node)].pop(0)
    _added(a, b, partner)
    return partner


def _added(a: Sequence[PlanNode], b: Sequence[PlanNode], partner: dict[int, int]) -> None:
    """Match the casts and pads of the same values; there may be chains of them."""
    same = {a[i].name: b[j].name for i, j in partner.items()}
    places: dict[Hashable, list[int]] = defaultdict(list)
    for j, node in enumerate(b):
        if node.is_added:
            places[node.rule, node.op, node.reads].append(j)
    for i, node in enumerate(a):
        reads = tuple(same.get(name, name) for name in node.reads)
        found = places.get((node.rule, node.op, reads))
        if node.is_added and found:
            partner[i] = found.pop(0)
            same[node.name] = b[partner[i]].name


# -- text ------------------------------------------------------------------------------------------


def _side_by_side(title: str, pairs: dict[str, tuple[str, str]]) -> Grid:
    grid = Grid((title, "first", "second"))
    for name, (a, b) in pairs.items():
        grid.add(name, a, b, style="bold" if a != b else "")
    return grid


def _table(nodes: Sequence[NodeDiff]) -> Grid:
    grid = Grid(("graph", "node", "op", "first", "second", "module", "reason"))
    for one in nodes:
        shown = one.second or one.first
        assert shown is not None
        names = dict.fromkeys(node.name for node in (one.first, one.second) if node)
        cells = (_cell(one.first), _cell(one.second), shown.module, shown.reason)
        op = short(shown.op)
        grid.add(str(one.graph), " / ".join(names), op, *cells, style=style(shown))
    return grid


def _cell(node: PlanNode | None) -> str:
    return "-" if node is None else f"{node.precision} {node.planned} [{node.rule}]"
