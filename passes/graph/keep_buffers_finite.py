"""Let no overflow stay behind in a buffer. A rewriting pass, for FP16.

                                          own = clone(running_var)
    h: f16 = linear(x, w)                 h: f16 = linear(x, w)
    batch_norm(h, ..., running_var) ->    batch_norm(h, ..., own)
                                          finite = where(isfinite(own), own, running_var)
                                          copy_(running_var, finite)

A step that overflows is skipped, and leaves no trace in the parameters. But its forward has written
to buffers already: running statistics, moving averages, codebooks, queues. One infinity stays there
for ever, and evaluation is NaN from then on; in FP32 it would not have been. So the graph writes to
a copy, and at its end writes that back, but for what is not finite. This is asked in the graph:
nothing waits for the device, whatever else is decided about the step, on any rank. Compiled, it is
a part of the kernel that writes the buffer.

A graph that goes backward keeps all its buffers so, any other only running statistics: a cache that
a generation writes to is as large as it is long.

What is finite stays, also of a step that is skipped: the data were those of FP32. A buffer that
the program itself fills with infinities, without a LOW operator before it, is left alone; so is a
write that autograd tracks.
"""

from __future__ import annotations

import functools
from collections import Counter

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.rules.policy import Config, Precision
from mpcompile.torch_inside.graphs import schema
from mpcompile.torch_inside.names import OpOverload


def keep_buffers_finite(gm: fx.GraphModule, config: Config) -> bool:
    graph = gm.graph
    inputs = graph.find_nodes(op="placeholder")
    holders = Counter(map(ir.storage, inputs))
    buffers = {m for n in inputs if _is_buffer(n) and holders[m := ir.storage(n)] == 1}
    trains = config.scaled and any(map(ir.requires_grad, inputs))
    written = _written_after_low(graph, buffers, trains=trains)
    for node in [n for n in inputs if ir.storage(n) in written]:
        _keep_finite(graph, node)
    return bool(written)


def _is_buffer(node: fx.Node) -> bool:
    value = ir.captured(node)
    floating = value is not None and value.is_floating_point()
    return floating and not ir.requires_grad(node) and ir.copy_of(node) is None


def _written_after_low(
    graph: fx.Graph, buffers: set[int | None], *, trains: bool
) -> set[int | None]:
    """The memory of inputs that is written, and never as autograd tracks it, with values that
    depend on a LOW operator in FP16.
    """
    low = {n for n in graph.nodes if _may_overflow(n)}
    dirty: set[int | None] = set()  # memory that was written with such values
    results = graph.output_node().all_input_nodes
    left = {ir.storage(n) for n in results if n.op != "placeholder"}  # shown to the caller
    for node in graph.nodes:
        if any(n in low or ir.storage(n) in dirty for n in node.all_input_nodes):
            low.add(node)
        for memory in buffers.intersection(map(ir.storage, ir.written(node))):
            declared = _declares_writes(node)
            tracked = declared and ir.grad_enabled(node)
            if ir.is_opaque(node) or (tracked and any(map(ir.requires_grad, node.all_input_nodes))):
                left.add(memory)
            elif node in low and (trains or not declared):
                dirty.add(memory)
    return dirty - left


def _may_overflow(node: fx.Node) -> bool:
    """Whether it computes in FP16, or may come from another graph that does."""
    if node.op == "placeholder":
        return ir.requires_grad(node) and not ir.is_parameter(node) and ir.copy_of(node) is None
    low = ir.precision(node) is Precision.LOW
    return low and ir.mark(node).low is torch.float16


def _declares_writes(node: fx.Node) -> bool:
    """Whether its schema says that it writes: such a write has a history. (Running statistics are
    written without their schema's saying so.)
    """
    return not isinstance(node.target, OpOverload) or schema(node.target).is_mutable


def _keep_finite(graph: fx.Graph, node: fx.Node) -> None:
    decision = ir.added(ir.Role.FINITE, "an overflow leaves the buffer as it was")
    insert, name = functools.partial(ir.insert, like=node, decision=decision), node.name
    own = ir.copy_to_write(node, node, decision)
    node.replace_all_uses_with(own, lambda user: user not in (own, graph.output_node()))
    with graph.inserting_before(graph.output_node()):
        is_finite = insert(aten.isfinite.default, own, name=f"{name}_is_finite")
        finite = insert(aten.where.self, is_finite, own, node, name=f"{name}_finite")
        insert(aten.copy_.default, node, finite, name=f"{name}_back")
