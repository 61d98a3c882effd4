"""Decide the FOLLOW nodes: LOW or FULL. A deciding pass; afterwards no node is FOLLOW.

O1, arithmetic: LOW where every FP32 operand comes from a LOW node, else FULL (the widest operand
wins, so an accumulating path stays FP32). What feeds only FP32 consumers goes back to FULL: inside
a fused kernel the wider arithmetic is free and exact.

    linear: LOW -> gelu -> linear: LOW         gelu is LOW
    linear: LOW -> dropout -> add(FP32 x)      dropout is FULL, add is FULL
    linear: LOW -> gelu -> mean: FULL          gelu is FULL

O2, arithmetic: LOW where FOLLOW nodes connect it to some LOW node on either side: values are stored
low. An island between FULL nodes, and everything 0-d (a loss), stays FULL.

Views and moves do no arithmetic, so they take the dtype of what they read; a view that only LOW
nodes read is LOW, which puts one cast before it instead of several after it.

O3: everything LOW that is not pinned.
"""

from __future__ import annotations

import networkx as nx
from torch import fx

from mpcompile import ir, ops
from mpcompile.policy import Config, Level, Precision

LOW, FULL, FOLLOW, KEEP = Precision.LOW, Precision.FULL, Precision.FOLLOW, Precision.KEEP


def plan(gm: fx.GraphModule, config: Config) -> bool:
    if config.level is Level.O3:
        _unpin_table(gm.graph, config)
    undecided = [n for n in gm.graph.nodes if ir.precision(n) is FOLLOW]
    connected = _connected_to_low(undecided) if config.level is Level.O2 else set()
    for node in undecided:
        _decide(node, config.level, node in connected)
    if config.level is Level.O1:
        for node in reversed(undecided):
            _widen_before_full(node)
    for node in reversed(undecided):
        _narrow_view_before_low(node)
    return False


def _decide(node: fx.Node, level: Level, connected: bool) -> None:
    if ir.kind(node) is not ops.Kind.COMPUTE:
        narrow = [n for n in node.all_input_nodes if ir.was_f32(n) or ir.is_getitem(node)]
        low = bool(narrow) and all(ir.precision(n) is LOW for n in narrow)
        return _settle(node, LOW if low else FULL, "takes the dtype of what it reads")
    value = ir.captured(node)
    if level is Level.O3:
        return _settle(node, LOW, "O3: everything low")
    if value is not None and value.ndim == 0:
        return _settle(node, FULL, "one number: FP32 costs nothing")
    if level is Level.O2:
        if connected:
            return _settle(node, LOW, "O2: stored low beside low neighbours")
        return _settle(node, FULL, "no low neighbour")
    operands = _operands(node)
    wide = [n.name for n in operands if ir.precision(n) is not LOW]
    if operands and not wide:
        return _settle(node, LOW, "fed by low values only")
    return _settle(node, FULL, f"the widest operand wins: {wide[0]} is FP32" if wide else "FP32 in")


def _operands(node: fx.Node) -> list[fx.Node]:
    """The FP32 operands that count: castable ones, no constant, no number that would promote."""
    found = [n for i, n in ir.float_args(node) if ops.castable(node.target, i)]
    # A constant takes the dtype of its company; guard_constants has seen that it survives that.
    found = [n for n in found if not ir.is_constant(n)] or found
    if ir.op_name(node) in ops.PROMOTES:
        return [n for n in found if ir.captured(n).ndim] or found  # type: ignore[union-attr]
    return found


def _settle(node: fx.Node, precision: Precision, reason: str) -> None:
    ir.remark(node, precision=precision, rule="plan", reason=f"{ir.mark(node).reason}; {reason}")


def _connected_to_low(undecided: list[fx.Node]) -> set[fx.Node]:
    """FOLLOW nodes that a path of FOLLOW nodes joins to a LOW one, as producer or consumer."""
    graph: nx.Graph[fx.Node] = nx.Graph()
    graph.add_nodes_from(undecided)
    members = set(undecided)
    touching = set()
    for node in undecided:
        for neighbour in (*node.all_input_nodes, *node.users):
            if neighbour in members:
                graph.add_edge(node, neighbour)
            elif ir.precision(neighbour) is LOW:
                touching.add(node)
    joined: set[fx.Node] = set()
    for component in nx.connected_components(graph):
        if component & touching:
            joined |= component
    return joined


def _widen_before_full(node: fx.Node) -> None:
    """LOW arithmetic that only FP32 consumers read becomes FULL."""
    low_compute = ir.kind(node) is ops.Kind.COMPUTE and ir.precision(node) is LOW
    if low_compute and node.users and all(ir.precision(u) is not LOW for u in node.users):
        _settle(node, FULL, "only FP32 consumers")


def _narrow_view_before_low(node: fx.Node) -> None:
    """An FP32 view that only LOW nodes read becomes LOW: the cast moves above it."""
    full_view = ir.kind(node) is ops.Kind.VIEW and ir.precision(node) is FULL
    if ir.is_mutable(node) or not (full_view and node.users):
        return
    if all(ir.precision(user) is LOW for user in node.users):
        _settle(node, LOW, "only low consumers")


def _unpin_table(graph: fx.Graph, config: Config) -> None:
    for node in graph.nodes:
        pinned = ir.precision(node) is FULL and ir.mark(node).rule == "table"
        if pinned and config.has_kernel(node):
            ir.remark(node, precision=LOW, rule="plan", reason="O3: everything low")
