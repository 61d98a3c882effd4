"""Count what a GPU would be asked to do, with no kernel generated and none run.

    counter = count(device)              # from now on Inductor plans kernels and stops there
    with device:
        ...                              # two steps of training
        with counter.watch() as done:    # a list of Launch, filled as the program runs
            ...                          # the third

A graph goes all of Inductor's way up to and including its scheduler, which decides what is fused.
In place of code generation stands the list of kernels that would be launched; a call of the
compiled graph appends it, and returns fakes of the sizes and strides that Inductor chose. What runs
outside of compiled graphs (a GradScaler, a fused optimizer) is counted operator by operator.

Torch internals used here were read in torch 2.13.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor import ir, scheduler
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from .device import FakeGPU
from .eager import eager_launches
from .inductor import let_inductor_in
from .launches import Launch, launches

__all__ = ["Counter", "count"]


class Counter:
    """The kernels launched while somebody watches.

    Attributes:
        done: those of the last watch, in their order.
    """

    def __init__(self) -> None:
        self.done: list[Launch] = []
        self._watching = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[Launch]]:
        """The kernels launched inside, in their order."""
        self.done, self._watching = [], True
        try:
            with _Eager(self):
                yield self.done
        finally:
            self._watching = False

    def add(self, found: Sequence[Launch]) -> None:
        if self._watching:
            self.done.extend(found)


def count(device: FakeGPU) -> Counter:
    """Let Inductor plan kernels for the device, and count them. For the rest of the process."""
    let_inductor_in(device)
    counter = Counter()
    # Triton is imported where code is generated, which is not reached.
    scheduler.has_triton = lambda: True

    def plan(graph: GraphLowering) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        graph.cache_key, graph.cache_path, graph.cache_linemap = "", os.devnull, []
        return SimpleNamespace(call=_planned(graph, counter))

    GraphLowering.compile_to_module = plan  # type: ignore[method-assign]
    return counter


def _planned(graph: GraphLowering, counter: Counter) -> Callable[[list[Any]], tuple[Any, ...]]:
    """In place of the compiled graph."""
    found = launches(graph.scheduler)
    names = list(graph.graph_inputs)
    makers = [_maker(output, names) for output in graph.graph_outputs]

    def call(args: list[Any]) -> tuple[Any, ...]:
        given = list(args)
        args.clear()
        counter.add(found)
        return tuple(make(given) for make in makers)

    return call


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


class _Eager(TorchDispatchMode):
    """Counts the operators that run by themselves."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo runs no compiled graph under any other mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counter.add(eager_launches(func, args, kwargs or {}, result))
        return result
