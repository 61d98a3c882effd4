"""Graphs that go all of Inductor's way up to and including its scheduler, which decides what is
fused, and no further: what it planned can be counted, on any machine and without a clock.

    plan_only(lambda graph: lambda: print(len(graph.scheduler.nodes)))  # at each call of a graph

Torch internals used here were read in torch 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._inductor import ir, scheduler
from torch._inductor.dependencies import Dep, MemoryDep, StarDep
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode


def plan_only(planned: Callable[[GraphLowering], Callable[[], None]]) -> None:
    """In place of code generation, for the rest of the process.

    Args:
        planned: takes a graph that is scheduled; what it returns is called at each call of the
            graph, which returns memory of the sizes and strides that Inductor chose, unset.
    """

    def plan(graph: GraphLowering) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        graph.cache_key, graph.cache_path, graph.cache_linemap = "", os.devnull, []
        called = planned(graph)
        names = list(graph.graph_inputs)
        makers = [_maker(output, names) for output in graph.graph_outputs]

        def call(args: list[Any]) -> tuple[Any, ...]:
            given = list(args)
            args.clear()
            called()
            return tuple(make(given) for make in makers)

        return SimpleNamespace(call=call)

    GraphLowering.compile_to_module = plan  # type: ignore[method-assign]


def _maker(output: ir.IRNode, names: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """What makes one result of a graph from its inputs."""
    if isinstance(output, (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)):
        value = None if isinstance(output, ir.NoneAsConstantBuffer) else int(output.expr)
        return lambda given: value
    view = isinstance(output.data, ir.ReinterpretView) if hasattr(output, "data") else False
    if not view and output.get_name() in names:
        index = names.index(output.get_name())
        return lambda given: given[index]
    size, stride = ([int(n) for n in dims] for dims in (output.get_size(), output.get_stride()))
    dtype, device = output.get_dtype(), output.get_device()
    return lambda given: torch.empty_strided(size, stride, dtype=dtype, device=device)


_NO_KERNEL = (
    ir.MultiOutput, ir.ResizeStorageBytes, ir.SetSourceTensorKernel, ir.AssertScalar,
    ir.DynamicScalar,
)  # fmt: skip


def is_kernel(node: BaseSchedulerNode) -> bool:
    """Whether anything is launched for a node."""
    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return False
    return not (node.is_extern() and isinstance(node.node, _NO_KERNEL))


def moved(node: BaseSchedulerNode, but: Set[str] = frozenset()) -> int:
    """Bytes that a generated kernel reads and writes, these buffers aside: each buffer once and no
    more than there is of it, Inductor's own count (`get_read_write_buffer_accesses`).

    That has buffers in it that a kernel only waits for: one that it writes over without a look at
    it is a read, too, so that whoever wrote it before comes first (`StarDep`).
    """
    reads = node.read_writes.reads
    looked_at = {dep.name for dep in reads if isinstance(dep, MemoryDep) or _adds(dep)}
    awaited = {dep.name for dep in reads} - looked_at
    accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    return sum(size for name, size in accesses.items() if name not in awaited | but)


def _adds(dep: Dep) -> bool:
    """Whether it is a write that adds to what is there."""
    return isinstance(dep, StarDep) and dep.mode is not None


def origin(operation: Any) -> fx.Node | None:
    """The call that became this library kernel; one of several results has it among others only."""
    found: fx.Node | None = operation.get_origin_node()
    if found is None:
        own = (o for o in operation.get_origins() if o.target is operation.op_overload)
        return next(own, None)
    return found


def origins(node: BaseSchedulerNode) -> list[fx.Node]:
    """The calls that a kernel comes from."""
    found = [o for n in node.get_nodes() if n.node is not None for o in n.node.get_origins()]
    return [o for o in dict.fromkeys(found) if o.op == "call_function"]


def name_of(node: BaseSchedulerNode) -> str:
    """The names of the operators that a kernel comes from."""
    targets = dict.fromkeys(o.target for o in origins(node))
    return ", ".join(dict.fromkeys(getattr(t, "__name__", str(t)) for t in targets))
