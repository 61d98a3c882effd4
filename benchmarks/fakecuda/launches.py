"""The kernels that Inductor's scheduler plans for a graph: what each moves and multiplies.

A kernel that Inductor generates is a node of the scheduler, after fusion; its bytes are what the
node reads and writes (`harness/scheduled.py`). A library's kernel (a matrix product, a convolution,
attention) moves its operands and results; the images of a convolution may have to be transposed
beside it (`cuda_parts/transposes.py`).

Torch internals used here were read in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._inductor import scheduler
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.triton_combo_kernel import ComboKernel
from torch._inductor.fx_utils import count_flops_fx
from torch._inductor.runtime.runtime_utils import last_power_of_2
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

from benchmarks.cuda_parts.transposes import transposed
from benchmarks.harness.scheduled import is_kernel, moved, name_of, origin


@dataclass(frozen=True)
class Launch:
    """One kernel that is started on the GPU.

    Attributes:
        name: the operator, or the operators that were fused.
        kind: "generated" by Inductor, a "product", or another "library" kernel.
        bytes: read and written in memory.
        flops: of a product; 2 for each multiplication with its addition.
        dtype: that a product multiplies in.
    """

    name: str
    kind: str
    bytes: int
    flops: int = 0
    dtype: torch.dtype | None = None


def in_parts(whole: Launch, number: int) -> list[Launch]:
    """The kernels of an operator over lists of tensors, of which `number` share the work."""
    part, rest = divmod(whole.bytes, number) if number else (0, 0)
    parts = [replace(whole, bytes=part + (0 if i else rest)) for i in range(number)]
    return parts + [Launch(name, "library", 0) for name in short_ones(whole.name)]


def launches(planned: Scheduler) -> list[Launch]:
    """The kernels of a graph in their order. Called while Inductor compiles it."""
    replaced = _second_halves(planned)
    return [launch for node in planned.nodes if node not in replaced for launch in _of(node)]


def _of(node: BaseSchedulerNode) -> Iterator[Launch]:
    if not is_kernel(node):
        return
    if node.is_extern():
        yield from in_parts(_library(node), _parts(node))
        yield from _transposes(node)
    elif isinstance(node, scheduler.ForeachKernelSchedulerNode):
        for group in _partitions(node):
            size = sum(moved(part) for part in group)
            yield Launch(name_of(node), "generated", size)
    elif isinstance(node, scheduler.FusedMixOrderReductions):
        yield from _rows_and_columns(node)
    else:
        yield Launch(name_of(node), "generated", moved(node))


def _library(node: BaseSchedulerNode) -> Launch:
    size = node.get_read_write_buffers_sizes()
    call = origin(node.node)
    if call is None:
        return Launch(type(node.node).__name__, "library", size)
    flops = count_flops_fx(call)
    name = str(call.target)
    if not flops:
        return Launch(name, "library", size)
    return Launch(name, "product", size, flops, call.all_input_nodes[0].meta["val"].dtype)


def _parts(node: BaseSchedulerNode) -> int:
    """In how many kernels a library works on a list of tensors; 1 for anything else."""
    call = origin(node.node)
    if call is None or not call.args or not isinstance(call.args[0], (list, tuple)):
        return 1
    if not any(name in str(call.target) for name in ("_foreach_", "unscale_all", "cast_all")):
        return 1
    lists = 2 if "cast_all" in str(call.target) else 1
    return launches_of([n.meta["val"].numel() for n in call.args[0]], TENSORS[lists - 1])


def _transposes(node: BaseSchedulerNode) -> Iterator[Launch]:
    """What cuDNN, or torch for it, lays out in another way around a convolution."""
    call = origin(node.node)
    if call is not None:
        for size in transposed(node.node, call.target, call.args):
            yield Launch("transpose around a convolution", "library", size)


def _partitions(node: scheduler.ForeachKernelSchedulerNode) -> list[list[BaseSchedulerNode]]:
    """The kernels that the parts of a multi-tensor operator end up in: a kernel takes only so many
    arguments, all tiled alike (`SIMDScheduling.generate_combo_kernel_code`).
    """
    backend: Any = node.scheduler.get_backend(node.get_device())
    triton: TritonScheduling = backend._triton_scheduling
    tilings = {}
    for part in node.get_subkernel_nodes():
        nodes = part.get_nodes()
        _, sizes = max(nodes, key=lambda n: int(n.is_reduction())).group
        tilings[part] = triton.select_tiling(triton.generate_node_schedule(nodes, *sizes), *sizes)
    found: list[list[BaseSchedulerNode]] = ComboKernel.horizontal_partition(
        nodes=list(tilings),
        triton_scheduling=triton,
        custom_algorithm=node.use_custom_partition_algo,
        node_info_map={part: _Tiled(tiling) for part, tiling in tilings.items()},
    )
    return [group for group in found if group]


@dataclass(frozen=True)
class _Tiled:
    """What `ComboKernel.horizontal_partition` reads of Inductor's NodeInfo."""

    tiling: dict[str, Any]


def _rows_and_columns(node: scheduler.FusedMixOrderReductions) -> Iterator[Launch]:
    """A kernel that reduces over rows and over columns at once leaves partial sums over columns,
    one for each group of rows, and torch adds these up in a kernel for each result
    (`SIMDScheduling._codegen_mix_order_reduction`).
    """
    rows, width = map(int, scheduler.MixOrderReduction.get_numel_rnumel(node.node1))
    processors = torch.cuda.get_device_properties().multi_processor_count
    group = min(max(last_power_of_2(rows // (8 * processors)), 16), 128)
    sums = _column_sums(node)
    partial = 4 * width * -(-rows // group)
    own = {part.get_outputs()[0].get_name() for part in sums}
    yield Launch(name_of(node), "generated", moved(node, but=own) + partial * len(sums))
    for _ in sums:
        yield Launch("sum of partial sums", "library", partial + 4 * width)


def _column_sums(node: scheduler.FusedMixOrderReductions) -> list[BaseSchedulerNode]:
    return [part for part in node.node2.get_nodes() if part.is_reduction()]


def _second_halves(planned: Scheduler) -> set[BaseSchedulerNode]:
    """Of the sums over columns that Inductor had split in two, the second halves: torch's kernels
    that add up partial sums stand in their place.
    """
    return {
        part.get_outputs()[0].users[0].node
        for node in planned.nodes
        if isinstance(node, scheduler.FusedMixOrderReductions)
        for part in _column_sums(node)
        if part.node._split_size
    }


# -- multi tensor ----------------------------------------------------------------------------------
# The kernels of torch's operators over lists of tensors.
#
# How many tensors and how much of them one launch takes is stated in MultiTensorApply.cuh. A norm
# of each tensor takes two more kernels: zeros for the norms of the parts, and what makes one norm
# of those (ForeachReduceOp.cu).
#
# Read in torch 2.13, built for CUDA 13 as on PyPI.

_CHUNK = 65536  # elements that a block takes (kChunkSize)
_BLOCKS = 2240  # blocks of a launch (depth_to_max_blocks)
TENSORS = (770, 448, 336, 252, 210)  # of each list, by the number of lists (depth_to_max_tensors)


def launches_of(sizes: Sequence[int], most: int) -> int:
    """How many kernels `multi_tensor_apply` launches for tensors of these numbers of elements.

    Args:
        most: tensors that one launch takes.
    """
    found = tensors = blocks = 0
    for size in filter(None, sizes):
        tensors += 1
        chunks = -(-size // _CHUNK)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == _BLOCKS or (last and tensors == most):
                found += 1
                blocks, tensors = 0, 0 if last else 1
    return found + bool(blocks)


def short_ones(operator: str) -> tuple[str, ...]:
    """The names of short kernels that an operator launches besides."""
    return (
        ("zeros of partial norms", "norms of partial norms") if "_foreach_norm" in operator else ()
    )
