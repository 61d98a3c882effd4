"""Graphs of optimizer steps: their inputs by `Slot`, and calls added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from ..torch_inside.graphs import rename
from .edit import add_input, cut, new_call
from .marks import Role, added, set_mark
from .step_config import Slot
from .values import aten, fake_mode, value


def slots(graph: fx.Graph) -> dict[Slot, fx.Node]:
    """The inputs of a step's graph by slot."""
    return {node.meta["mp_slot"]: node for node in graph.find_nodes(op="placeholder")}


def set_slot(node: fx.Node, slot: Slot) -> None:
    """Set the slot of an input of a step's graph, and name the input after it."""
    node.meta["mp_slot"] = slot
    rename(node, str(slot))


def slot_of(node: fx.Node) -> Slot:
    """The slot of an input of a step's graph."""
    found: Slot = node.meta["mp_slot"]
    return found


def scalar_slot(graph: fx.Graph, wanted: Slot, dtype: torch.dtype) -> fx.Node:
    """The 0-d input `wanted`, on the device of the others; added if it isn't there yet."""
    known = slots(graph)
    if wanted not in known:
        device = value(next(iter(known.values()))).device
        with fake_mode(graph):
            return add_slot(graph, wanted, torch.empty((), dtype=dtype, device=device))
    return known[wanted]


def become_tensor(node: fx.Node) -> None:
    """Turn an input that is a symbolic number into a 0-d FP64 tensor of that number."""
    device = value(next(iter(slots(node.graph).values()))).device
    with fake_mode(node.graph):
        node.meta["val"] = torch.empty((), dtype=torch.float64, device=device)


def add_slot(graph: fx.Graph, wanted: Slot, value: torch.Tensor) -> fx.Node:
    """Add an input after the last one."""
    node = add_input(graph, str(wanted), value)
    set_slot(node, wanted)
    return node


def writes(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """What a step's graph writes: (the `copy_` node, the input it writes, the value)."""
    found = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return [(node, *node.all_input_nodes) for node in found]


def part(
    nodes: Iterable[fx.Node], inputs: Mapping[fx.Node, Slot]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Some calls of a step's graph as a graph with these inputs: see `cut`."""
    graph, new = cut(nodes, inputs)
    for node, slot in zip(graph.find_nodes(op="placeholder"), inputs.values(), strict=True):
        node.meta = {"val": node.meta["val"]}
        set_slot(node, slot)
    return graph, new


def call(graph: fx.Graph, target: Any, *args: Any, why: str, **kwargs: Any) -> fx.Node:
    """Add a call to a step's graph at its insertion point, with its value and its reason."""
    node = new_call(graph, target, *args, **kwargs)
    set_mark(node, added(Role.STEP, why))
    return node


def inline(
    graph: fx.Graph,
    function: Callable[[Mapping[Slot, torch.Tensor]], Mapping[Slot, torch.Tensor]],
    inputs: Mapping[Slot, fx.Node],
    *,
    why: str,
) -> dict[Slot, fx.Node]:
    """Trace a function of named tensors, add its nodes at the insertion point of a step's graph.
    Returns the nodes of its results; a result that is an input of the function is that input.
    """
    named: dict[Slot, torch.Tensor] = {}

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        named.update(function(dict(zip(inputs, values, strict=True))))
        return [*named.values()]

    with fake_mode(graph), torch.no_grad():
        body = make_fx(run)(*map(value, inputs.values())).graph
    known = dict(zip(body.find_nodes(op="placeholder"), inputs.values(), strict=True))
    for node in body.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = call(graph, node.target, *args, why=why, **kwargs)
    results: Any = body.output_node().args[0]
    return {slot: known[result] for slot, result in zip(named, results, strict=True)}
