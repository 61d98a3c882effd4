"""Put values into memory of their own, where a result would be wrong in the memory that they have.
Rewriting passes.

**`keep_compared`** keeps in memory the values that are compared with what was picked from them.

    h: f16 = gelu(linear)                h: f16 = gelu(linear)
    k: f16 = topk(h, 5)[0]        ->     h_kept: f16 = kept(h)
    keep = ge(h, k)                      k: f16 = topk(h_kept, 5)[0]
                                         keep = ge(h_kept, k)

A compiler doesn't round a low value where it computes with it in the same loop, nor where the
backward computes it again. Who compares such a value with one that was picked from it when it was
rounded finds no equal one; the backward of `amax` then divides zero by zero.

`kept` (`mpcompile/operators/library.py`) is a copy that no fusion reaches across and that isn't
computed again: whatever reads it, forward or backward, reads the same elements. What is picked from
them is exact in any dtype (`mpcompile/ir/exact_reads.py`). It costs the copy, where such a
comparison is.

Contract. It runs after the passes that place casts. `mpcompile/ir/spec.py` looks at each graph
that is emitted: no value is left that is compared so.

**`keep_buffers_finite`** lets no overflow stay behind in a buffer, for FP16.

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
write that autograd tracks. Buffers that a call replaces are kept finite after it
(`runtime/module_call.py`); this pass says which results hold a program's own infinities.

**`copy_overlaps`** returns a copy in place of a result whose elements share memory.

    unfold = unfold(x, 1, 2, 1)             unfold = unfold(x, 1, 2, 1)
    return unfold                     ->    unfold_copy = contiguous(unfold)
                                            return unfold_copy

AOTAutograd gives the gradient of a result the result's strides; of several elements written to one
place only the last survives (torch 2.12 and 2.13; `torch.compile` gives wrong gradients for such a
result). A result that is a view of an input, or shares memory with another result, is left alone:
AOTAutograd makes such a view outside of the graph, where autograd adds up correctly and no loss
scale is involved. So is a stride of 0, which `expand` makes: AOTAutograd handles it correctly.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.rules.policy import Config, Precision
from mpcompile.torch_inside.graphs import schema
from mpcompile.torch_inside.names import OpOverload


def keep_compared(gm: fx.GraphModule, config: Config) -> bool:
    values = {value: node for node, value in ir.compared(gm.graph)}
    for value, node in values.items():
        why = ir.added(ir.Role.KEPT, f"{node.name} compares it with what was picked from it")
        keep, name = torch.ops.mpcompile.kept.default, f"{value.name}_kept"
        with gm.graph.inserting_before(ir.after(value)):
            kept = ir.insert(keep, value, name=name, like=value, decision=why)
        value.replace_all_uses_with(kept, functools.partial(operator.is_not, kept))
        ir.stands_for(kept, value)
    return bool(values)


def keep_buffers_finite(gm: fx.GraphModule, config: Config) -> bool:
    graph = gm.graph
    inputs = graph.find_nodes(op="placeholder")
    holders = Counter(map(ir.storage, inputs))
    buffers = {m for n in inputs if _is_buffer(n) and holders[m := ir.storage(n)] == 1}
    trains = config.scaled and any(map(ir.requires_grad, inputs))
    written = _written_after_low(graph, buffers, trains=trains)
    if config.low is torch.float16:
        gm.meta["mp_results_as_written"] = _results_as_written(graph)
    for node in [n for n in inputs if ir.storage(n) in written]:
        _keep_finite(graph, node)
    return bool(written)


def _is_buffer(node: fx.Node) -> bool:
    frozen = not ir.requires_grad(node) and ir.copy_of(node) is None
    return frozen and ir.was_floating(node)


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
            # A write that its schema tells of has a history. That of running statistics hasn't.
            declared = not isinstance(node.target, OpOverload) or schema(node.target).is_mutable
            tracked = declared and ir.grad_enabled(node)
            if ir.is_opaque(node) or (tracked and any(map(ir.requires_grad, node.all_input_nodes))):
                left.add(memory)
            elif node in low and (trains or not declared):
                dirty.add(memory)
    return dirty - left


def _results_as_written(graph: fx.Graph) -> tuple[int, ...]:
    """The floating results (by number) in which what is infinite is so by the program: they come
    from constants, whole numbers and parameters alone, and through no FP16.
    """
    written = {ir.storage(memory) for node in graph.nodes for memory in ir.written(node)}

    def is_other(node: fx.Node) -> bool:
        value = ir.tensor(node)
        if value is None or not value.is_floating_point():
            return False
        given = node.op == "placeholder" and not ir.is_parameter(node)
        return given or value.dtype is torch.float16 or ir.storage(node) in written

    def read(node: fx.Node) -> list[fx.Node]:
        return [] if ir.rule(node).creates else node.all_input_nodes

    results: Any = graph.output_node().args[0]
    floating = [i for i, r in enumerate(results) if isinstance(r, fx.Node) and ir.was_floating(r)]
    return tuple(i for i in floating if not any(map(is_other, ir.reached([results[i]], read))))


def _may_overflow(node: fx.Node) -> bool:
    """Whether it computes in FP16, or may come from another graph that does."""
    if node.op == "placeholder":
        return ir.requires_grad(node) and not ir.is_parameter(node) and ir.copy_of(node) is None
    low = ir.precision(node) is Precision.LOW
    return low and ir.mark(node).low is torch.float16


def _keep_finite(graph: fx.Graph, node: fx.Node) -> None:
    decision = ir.added(ir.Role.FINITE, "an overflow leaves the buffer as it was")
    insert, name = functools.partial(ir.insert, like=node, decision=decision), node.name
    own = ir.copy_to_write(node, node, decision)
    node.replace_all_uses_with(own, lambda user: user not in (own, graph.output_node()))
    with graph.inserting_before(graph.output_node()):
        is_finite = insert(aten.isfinite.default, own, name=f"{name}_is_finite")
        finite = insert(aten.where.self, is_finite, own, node, name=f"{name}_finite")
        insert(aten.copy_.default, node, finite, name=f"{name}_back")


def copy_overlaps(gm: fx.GraphModule, config: Config) -> bool:
    output = gm.graph.output_node()
    inputs = gm.graph.find_nodes(op="placeholder")
    if not any(map(ir.requires_grad, inputs)):
        return False
    results = list(output.args[0])  # type: ignore[arg-type]
    captured = gm.meta["mp_output_memory"]
    shared = {ir.storage(node) for node in inputs}
    shared |= {at for at, count in Counter(captured).items() if count > 1}
    for i, (result, at) in enumerate(zip(results, captured, strict=True)):
        value = ir.tensor(result) if isinstance(result, fx.Node) else None
        if value is None or not value.is_floating_point() or value.layout is not torch.strided:
            continue
        if at not in shared and _overlaps(value):
            results[i] = _copy(gm.graph, result)
    changed = results != list(output.args[0])  # type: ignore[arg-type]
    output.args = (tuple(results),)
    return changed


def _overlaps(value: torch.Tensor) -> bool:
    """Whether two elements share a place in memory, other than by a stride of 0."""
    sizes = zip(map(ir.hint, value.shape), map(ir.hint, value.stride()), strict=True)
    reach = 0  # from the first to the last element of the dimensions of smaller stride
    for stride, size in sorted((stride, size) for size, stride in sizes if size > 1 and stride > 0):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    why = ir.added(ir.Role.COPY, "its elements share memory, and their gradients would")
    name = f"{node.name}_copy"
    with graph.inserting_before(graph.output_node()):
        dense = ir.insert(aten.contiguous.default, node, name=name, like=node, decision=why)
    dense.meta["mp_captured"] = ir.value(dense)
    return dense
