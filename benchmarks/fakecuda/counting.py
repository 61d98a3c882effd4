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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor import scheduler
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.fakecuda.device import FakeGPU, let_inductor_in
from benchmarks.fakecuda.launches import TENSORS, Launch, in_parts, launches, launches_of
from benchmarks.harness.scheduled import plan_only


class Counter:
    """The kernels launched while someone watches.

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

    def planned(graph: GraphLowering) -> Callable[[], None]:
        found = launches(graph.scheduler)
        return lambda: counter.add(found)

    plan_only(planned)
    return counter


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


# -- eager -----------------------------------------------------------------------------------------
# The kernels of operators that run by themselves, outside of what Inductor compiles.
#
# An operator is one kernel, which reads its operands on the device and writes its results. Views
# and empty tensors are none. The multi-tensor operators take lists (`launches_of`). What each
# moves is stated in its own source:
#
# * `_fused_adamw_`: reads p, g, m, v and writes p, m, v: 28 bytes for each FP32 parameter. Under
# a GradScaler it unscales, and writes g as well: 32 (fused_adam_utils.cuh). *
# `_amp_foreach_non_finite_check_and_unscale_`: reads and writes g, 8 (AmpKernels.cu). *
# `_foreach_*`: reads its lists and writes what it returns or changes.
#
# Read in torch 2.13, built for CUDA 13 as on PyPI.

aten = torch.ops.aten

_NO_KERNEL = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten._local_scalar_dense.default, aten._reshape_alias.default,
}  # fmt: skip

# Nothing is read of what these are like, which may lie elsewhere.
_LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}

_WRITE_ONLY = {
    aten.copy_.default, aten._foreach_copy_.default, aten.fill_.Scalar, aten.fill_.Tensor,
    aten.zero_.default, aten._foreach_zero_.default,
}  # fmt: skip


def eager_launches(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> list[Launch]:
    """The kernels that a call of an operator launches on the device."""
    if op.namespace == "prim" or op.is_view or op in _NO_KERNEL:
        return []
    operands = _on_device((args, kwargs))
    results = _on_device(result)
    if not results and (not operands or op in _LIKE or op is aten.copy_.default):
        return []  # a copy to the host is none, as no read of a number is
    written = _written(op, args, kwargs)
    if op is aten._fused_adamw_.default and kwargs.get("grad_scale") is None:
        written = [t for t in written if not any(t is g for g in args[1])]
    read = [t for t in operands if op not in _WRITE_ONLY or not any(t is w for w in written)]
    moved = _bytes(read) + _bytes(written) + _bytes(_new(results, operands))
    lists = [a for a in args if isinstance(a, (list, tuple)) and _on_device(a)]
    if not lists or not _is_multi_tensor(op):
        return [Launch(str(op), "library", moved)]
    if op is aten._fused_adamw_.default:
        lists = lists[:4]  # the counters come along with them
    number = launches_of([t.numel() for t in lists[0]], TENSORS[len(lists) - 1])
    return in_parts(Launch(str(op), "library", moved), number)


def _is_multi_tensor(op: torch._ops.OpOverload) -> bool:
    name = op._schema.name
    return "_foreach_" in name or "_fused_" in name


def _on_device(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.device.type == "cuda"]


def _written(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The operands that the operator changes."""
    changed = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return _on_device(changed)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _new(results: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    known = {id(t) for t in operands}
    return [t for t in results if id(t) not in known]
