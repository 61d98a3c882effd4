"""A graph cut at its recurrent layers: which nodes run together, and each such section as a graph.

Why and where it is cut, and what runs the sections: `islands.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .. import ir
from ..errors import CannotRewrite
from ..ir.targets import ENTER_AUTOCAST, SET_GRAD_ENABLED
from ..rules import RNN_OPS
from ..torch_inside.graphs import schema

aten = torch.ops.aten


@dataclass(eq=False)
class Section:
    """Nodes that run together: an RNN node with its getitems or another operator that runs as it is
    (an island), or a piece to compile.
    """

    island: bool
    grad: bool  # the grad mode it starts in
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


def schedule(
    graph: fx.Graph, base: bool, apart: Callable[[fx.Node], bool]
) -> tuple[list[Section], bool]:
    """The sections in the order of the graph, and the grad mode at the graph's end."""
    sections: list[Section] = []
    grad = base
    results: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in results:
            continue
        if node.target in RNN_OPS:
            assert all(user.target is operator.getitem for user in node.users)
            sections.append(Section(True, grad, [node, *node.users]))
            results.update(node.users)
            continue
        if apart(node):
            sections.append(Section(True, grad, [node]))
            continue
        if not sections or sections[-1].island:
            sections.append(Section(False, grad, []))
        sections[-1].nodes.append(node)
        if node.target is SET_GRAD_ENABLED:
            grad = bool(node.args[0])
    busy = [s for s in sections if any(n.target is not SET_GRAD_ENABLED for n in s.nodes)]
    return busy, grad


def connect(graph: fx.Graph, sections: list[Section], symbols: list[fx.Node]) -> None:
    """Set the inputs and outputs of each section. Raises CannotRewrite, see `compile_around_rnns`.

    Every piece takes all symbols: Inductor can read `s` from an argument, but not from `2 * s`.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    owner = {node: section for section in sections for node in section.nodes}
    taken: dict[Section, set[fx.Node]] = {
        section: set() if section.island else set(symbols) for section in sections
    }
    wanted: set[fx.Node] = set(graph.output_node().all_input_nodes)
    for node, section in owner.items():
        for value in node.all_input_nodes:
            if value.op != "get_attr" and owner.get(value) is not section:
                taken[section].add(value)
                wanted.add(value)
    for section in sections:
        section.inputs = sorted(taken[section], key=position.__getitem__)
        section.outputs = [node for node in section.nodes if node in wanted]
        for node in section.outputs:
            if node.target is ENTER_AUTOCAST:
                raise CannotRewrite("an autocast region reaches across an RNN")


def outline(gm: fx.GraphModule, section: Section, base: bool) -> fx.GraphModule:
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
