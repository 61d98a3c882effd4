"""A graph cut at its recurrent layers: which nodes run together, and each such section as a graph.

Why and where it is cut: `islands.py`. What runs the sections (`chained`) runs the phases of a whole
training step, too (`whole_step/one_graph.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .. import ir
from ..ir.targets import SET_GRAD_ENABLED
from ..rules import RNN_OPS
from ..torch_inside.graphs import schema
from ..torch_inside.names import set_grad_enabled

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class RunSection(ir.Section):
    """Nodes that run together: an RNN node with its getitems or another operator that runs as it is
    (an island), or a piece to compile. `grad`: the grad mode it starts in.
    """

    island: bool
    grad: bool


def schedule(
    graph: fx.Graph, base: bool, apart: Callable[[fx.Node], bool], symbols: Sequence[fx.Node] = ()
) -> tuple[list[RunSection], bool]:
    """The sections in the order of the graph, and the grad mode at the graph's end.

    Every piece takes all symbols: Inductor can read `s` from an argument, but not from `2 * s`.
    """
    runs: list[tuple[bool, bool, list[fx.Node]]] = []  # whether it is an island, its mode, nodes
    grad = base
    results: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in results:
            continue
        if node.target in RNN_OPS:
            assert all(user.target is operator.getitem for user in node.users)
            runs.append((True, grad, [node, *node.users]))
            results.update(node.users)
            continue
        if apart(node):
            runs.append((True, grad, [node]))
            continue
        if not runs or runs[-1][0]:
            runs.append((False, grad, []))
        runs[-1][2].append(node)
        if node.target is SET_GRAD_ENABLED:
            grad = bool(node.args[0])
    busy = [run for run in runs if any(n.target is not SET_GRAD_ENABLED for n in run[2])]
    found = [RunSection.of(nodes, island=island, grad=begins) for island, begins, nodes in busy]
    position = {node: i for i, node in enumerate(graph.nodes)}
    for i, section in enumerate(found):
        taken = {*section.inputs, *(() if section.island else symbols)}
        found[i] = replace(section, inputs=tuple(sorted(taken, key=position.__getitem__)))
    return found, grad


def outline(gm: fx.GraphModule, section: RunSection, base: bool) -> fx.GraphModule:
    """The section as its own graph, with the notes that AOTAutograd reads from Dynamo's graphs."""
    graph, new = ir.cut(section.nodes, section.inputs)
    grad = section.grad
    if not section.island and grad is not base:
        with graph.inserting_before(ir.first_call(graph)):
            graph.call_function(SET_GRAD_ENABLED, (grad,))
    for node in section.nodes:
        if node.target is SET_GRAD_ENABLED:
            grad = bool(node.args[0])
    if section.nodes[0].target in RNN_OPS:
        _make_dense(graph, section.nodes[0], new)
    elif not section.island and grad is not base:
        graph.call_function(SET_GRAD_ENABLED, (base,))
    graph.output(tuple(new[node] for node in section.outputs))
    return ir.module_of(graph, gm)


def _make_dense(graph: fx.Graph, rnn: fx.Node, new: dict[fx.Node, fx.Node]) -> None:
    """Make the results of an RNN dense: see NOTE [Strides at a cut] in `islands.py`."""
    time_second = bind(rnn.target, rnn.args, rnn.kwargs).get("batch_first", False)
    for result in rnn.users:
        value = new[result]
        if time_second and result.args[1] == 0:
            value = graph.call_function(aten.transpose.int, (value, 0, 1))
            value = graph.call_function(aten.contiguous.default, (value,))
            new[result] = graph.call_function(aten.transpose.int, (value, 0, 1))
        else:
            new[result] = graph.call_function(aten.contiguous.default, (value,))


def bind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in schema(target).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


# -- run time -------------------------------------------------------------------------------------


def chained(
    graph: fx.Graph,
    sections: Sequence[ir.Section],
    functions: Sequence[Callable[..., Any]],
    leave: bool | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """A function that calls the sections of a graph in order on values by number, and drops each
    value after its last use.

    `leave`: the grad mode at the end, or None if it is the same as at the start.
    """
    inputs = graph.find_nodes(op="placeholder")
    computed = [node for section in sections for node in section.outputs]
    number = {node: i for i, node in enumerate([*inputs, *computed])}
    # Dropped at once, unless a later section reads it.
    last = {node: section for section in sections for node in (*section.outputs, *section.inputs)}
    for node in (*inputs, *graph.output_node().all_input_nodes):
        last.pop(node, None)
    calls = [
        (
            function,
            [number[node] for node in section.inputs],
            [number[node] for node in section.outputs],
            [number[node] for node, user in last.items() if user is section],
        )
        for section, function in zip(sections, functions, strict=True)
    ]
    (returned,) = graph.output_node().args
    assert isinstance(returned, (tuple, list))
    # The caller may want constants too (None, for example).
    results = [number[v] if isinstance(v, fx.Node) else (v,) for v in returned]

    def run(*args: Any) -> tuple[Any, ...]:
        values = dict(enumerate(args))
        for function, given, made, done in calls:
            values.update(zip(made, function(*[values[i] for i in given]), strict=True))
            for i in done:
                del values[i]
        if leave is not None:
            set_grad_enabled(leave)
        return tuple([values[r] if isinstance(r, int) else r[0] for r in results])

    return run
