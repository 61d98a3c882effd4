"""The answer to "why is this node what it is?", and to the same question about a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..errors import MPCompileError, did_you_mean, shortened
from .grid import Grid, Part, as_text
from .min_cut import NEVER, OF_RESULT, Weighed
from .objective import UNIT
from .partitioned import BackwardNode
from .plan_data import GraphData, PlanNode
from .plan_text import dtype_word, node_grid, runs_in, short

Graphs = Mapping[int | None, GraphData]


class Answer(str):
    """A text that an interactive session shows as it prints: with its line ends."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def answer(graphs: Graphs, name: str, modules: Iterable[str] = ()) -> Answer:
    """What is known of the nodes and modules of that name.

    Args:
        graphs: number of a graph, or None if there is one alone -> its plan.
        name: of a node, of an operator of the backward, of a module; or the end of modules' paths,
            if no module has just that path.
        modules: the paths of all modules, those without an operator included.

    Raises:
        MPCompileError: nothing has that name.
    """
    if not isinstance(name, str):
        raise MPCompileError(f"why({name!r}): give the name of a node or of a module")
    nodes = [node for graph in graphs.values() for node in graph.nodes]
    paths = dict.fromkeys([*modules, *(node.module for node in nodes if node.module)])
    parts = [part for number, graph in graphs.items() for part in _named(graph, number, name)]
    ends = [path for path in paths if path.endswith(f".{name}")] if name else []
    for path in [name] if name in paths else ends:
        parts += _module(graphs, path)
    if not parts:
        known = [line.name for graph in graphs.values() for line in graph.after]
        hint = did_you_mean(name, dict.fromkeys([*known, *(node.name for node in nodes), *paths]))
        raise MPCompileError(f"the plan has no node and no module {name!r}{hint}")
    return Answer(as_text(parts))


# -- a node ----------------------------------------------------------------------------------------


def _named(graph: GraphData, number: int | None, name: str) -> Iterator[Part]:
    """What one graph knows of a name: a node, an input, an operator of the backward."""
    where = "" if number is None else f" in graph {number}"
    nodes = {node.name: node for node in graph.nodes}
    if name in nodes:
        yield from _node(graph, nodes, nodes[name], where)
    elif lines := _lines(graph, name):
        yield f"{name}{where}: there was nothing to decide"
        yield _facts(lines)
    for one in graph.backward:
        if one.name == name:
            yield f"{name} in the backward{where}: {_computes(one)}"
            if one.forward in nodes and one.forward != name:
                yield from _node(graph, nodes, nodes[one.forward], where)


def _node(
    graph: GraphData, nodes: Mapping[str, PlanNode], node: PlanNode, where: str
) -> Iterator[Part]:
    how = runs_in(node, graph.dtype)
    yield f"{node.name}{where}: {how}, decided by {node.rule}: {node.reason}"
    facts = [*_lines(graph, node.name), ("operator", node.op), ("module", node.module)]
    facts += [("source", frame) for frame in node.frames or (node.source,)]
    facts += [("Tensor Cores", str(op)) for op in graph.tensor_cores.ops if op.name == node.name]
    facts += [("backward", _computes(b)) for b in graph.backward if b.forward == node.name]
    yield _facts([*facts, ("to change it", node.change)])
    if around := [*_above(nodes, node), *_below(nodes, node)]:
        lines = {line.name: line.text for line in graph.after}
        grid = Grid(("casts and pads around it", "", ""), indent=2)
        for label, other in around:
            grid.add(label, lines.get(other.name, other.name), f"{other.rule}: {other.reason}")
        yield grid
    for one in graph.weighed([node.name]):
        grid, notes = what_was_weighed(one, dtype_word(node.low or graph.dtype))
        yield from [grid] if grid.rows else []
        yield from (f"  {note}" for note in notes)


def _facts(facts: Iterable[tuple[str, str]]) -> Grid:
    """A line for each fact; the label stands before the first of several lines alike."""
    grid, previous = Grid((), indent=2), ""
    for label, text in facts:
        if text:
            grid.add("" if label == previous else label, text)
            previous = label
    return grid


def _lines(graph: GraphData, name: str) -> list[tuple[str, str]]:
    """The node's line before and after, where there is one."""
    sides = (("before", graph.before), ("after", graph.after))
    return [(side, line.text) for side, lines in sides for line in lines if line.name == name]


def _computes(one: BackwardNode) -> str:
    what = f"{one.name}: {one.result} = {short(one.op)}"
    if not one.forward:
        return what
    return f"{what}, {'computes again' if one.recomputed else 'of the gradient of'} {one.forward}"


def _above(nodes: Mapping[str, PlanNode], node: PlanNode) -> Iterator[tuple[str, PlanNode]]:
    """What passes have put between the node and the operands that the program gives it."""
    for name in node.reads:
        if name in nodes and nodes[name].is_added:
            yield from _above(nodes, nodes[name])
            yield "it reads", nodes[name]


def _below(nodes: Mapping[str, PlanNode], node: PlanNode) -> Iterator[tuple[str, PlanNode]]:
    """What passes have put between the node and its readers."""
    for reader in nodes.values():
        if reader.is_added and node.name in reader.reads:
            yield "is read by", reader
            yield from _below(nodes, reader)


_TERMS = {
    "time": "estimated times, as bytes that memory moves meanwhile",
    "doubt": "a tenth of those in half precision: estimates may be off",
    "weights": "casts of weights and of their gradients",
    "stored": "what values in FP32 take more",
    "cast": "casts between neighbours",
    "view": "a cast after a view, not before it",
}


def what_was_weighed(one: Weighed, low: str) -> tuple[Grid, list[str]]:
    """The least totals of the graph with either precision of an item, as planned first; and what
    else there is to say: whether there was a choice at all, and which nodes would change, too.
    """
    words = (low, "FP32") if one.low else ("FP32", low)
    what = "its result is in" if one.name.endswith(OF_RESULT) else "it runs in"
    head = f"least total, in bytes of traffic, where {what}"
    grid = Grid((head, f"{words[0]}, as planned", words[1]), indent=2)
    if ruled_out := [term for term, (_, other) in one.costs.items() if other >= NEVER]:
        return grid, [f"never {words[1]}, whatever it costs: {', '.join(ruled_out)}"]
    more = one.totals[1] - one.totals[0]
    terms = [term for term in dict.fromkeys([*_TERMS, *one.costs]) if term in one.costs]
    rows = {_TERMS.get(term, term): one.costs[term] for term in terms}
    same = one.totals[0] - sum(chosen for chosen, _ in rows.values())
    for label, both in {**rows, "all else": (same, same), "together": one.totals}.items():
        grid.add(label, *(f"{cost / UNIT:,.{4 if 0 < more < UNIT else 0}f}" for cost in both))
    notes = [] if more else ["the same in either: then FP32"]
    if one.others:
        notes.append(f"{words[1]} would take along: {shortened(one.others)}")
    return grid, notes


# -- a module --------------------------------------------------------------------------------------


def _module(graphs: Graphs, path: str) -> Iterator[Part]:
    """The nodes of a module and of the modules in it, graph by graph."""
    title = f"module {path}" if path else "the model itself"
    inside = f"{path}." if path else ""
    empty = True
    for number, graph in graphs.items():
        nodes = [n for n in graph.nodes if n.module == path or n.module.startswith(inside)]
        if nodes:
            yield title if number is None else f"{title} in graph {number}"
            yield node_grid(nodes, graph.dtype)
            empty = False
    if empty:
        left = [graph.left for graph in graphs.values() if graph.left is not None]
        because = f"; graphs stay in FP32: {'; '.join(left)}" if left else ""
        yield f"{title}: no operator of a rewritten graph comes from it{because}"
