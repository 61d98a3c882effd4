"""Lay out in order what a large pool reads. A rewriting pass, on a graph as Inductor lowers it.

                                                  laid = force_stride_order(x, [.., h * w, w, 1])
    pool = max_pool3d_with_indices(x, [3])  ->    pool = max_pool3d_with_indices(laid, [3])

Here depth, height and width of x don't lie in this order in memory.

Of a window of more than 25 elements Inductor makes a loop, and orders its dimensions as the operand
lies in memory. The place of the maximum is counted in that order, and read as if it were counted in
the order of the dimensions (`POOLS_COUNT_OTHERWISE`): indices, and with them gradients, are those
of other elements. An operand that lies in order, channels innermost or not, is counted right.

It costs a copy of such an operand. Smaller windows, as those of most pools over images, are written
out element by element.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten

_POOLS: dict[Any, int] = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
}
_FORCE = torch.ops.prims.inductor_force_stride_order.default
_WRITTEN_OUT = 25
"""Elements of the largest window that Inductor writes out."""


def order_pools(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    found = [(n, dims) for n in graph.nodes if (dims := _POOLS.get(n.target))]
    pools = [(pool, dims) for pool, dims in found if _is_loop(pool, dims)]
    for pool, dims in pools:
        value: Any = pool.args[0]
        with graph.inserting_before(pool):
            laid = ir.new_call(graph, _FORCE, value, _in_order(ir.value(value), dims))
        pool.replace_input_with(value, laid)
    return bool(pools)


def _is_loop(pool: fx.Node, dims: int) -> bool:
    window: Any = pool.args[1]
    elements = math.prod(window) if len(window) > 1 else window[0] ** dims
    return bool(elements > _WRITTEN_OUT)


def _in_order(volume: torch.Tensor, dims: int) -> list[Any]:
    """Its strides if its last dimensions lie in their order in memory, else contiguous ones."""
    sizes = zip(volume.shape[-dims:], volume.stride()[-dims:], strict=True)
    strides = [ir.hint(stride) for size, stride in sizes if ir.hint(size) > 1]
    if strides == sorted(strides, reverse=True):
        return list(volume.stride())
    return list(torch.empty_like(volume, memory_format=torch.contiguous_format).stride())
