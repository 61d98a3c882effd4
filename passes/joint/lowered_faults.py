"""What Inductor gets wrong, or does twice. Rewriting passes, on a graph as Inductor lowers it; each
returns whether it changed anything. `mpcompile/devices/torch_faults.py` has the releases of torch.

**`fill_zeros`** gives tangents of zeros memory (`ZEROS_ARE_REUSED`).

    zero = _efficientzerotensor([16, 16])    ->    zero = full([16, 16], 0)

Forward mode (`torch.func.jvp`, `jacfwd`, `hessian`) makes such a zero for what has no tangent. It
has no memory and can't be written, and Inductor's code, which knows it as any other buffer, reuses
its memory for the next result: the compiled graph raises.

**`order_pools`** lays out in order what a large pool reads (`POOLS_COUNT_OTHERWISE`).

                                                  laid = force_stride_order(x, [.., h * w, w, 1])
    pool = max_pool3d_with_indices(x, [3])  ->    pool = max_pool3d_with_indices(laid, [3])

Here depth, height and width of x don't lie in this order in memory.

Of a window of more than 25 elements Inductor makes a loop, and orders its dimensions as the operand
lies in memory. The place of the maximum is counted in that order, and read as if it were counted in
the order of the dimensions: indices, and with them gradients, are those of other elements. An
operand that lies in order, channels innermost or not, is counted right. It costs a copy of any
other. Smaller windows, as those of most pools over images, are written out element by element.

**`widen_maxima`** takes maxima of low values in FP32 (`MAXIMA_DECLARED_TWICE`).

    a: bf16 = amax(x, [1])                 wide: f32 = convert(x, f32)
    b: bf16 = amax(y, [2])         ->      a_wide: f32 = amax(wide, [1])
                                           a: bf16 = convert(a_wide, bf16)
                                           ...

Where two equal maxima of a low dtype meet in one loop, Inductor's C++ declares a variable twice and
does not compile. In FP32 it does. A maximum is exact, so the results are the same, and the loop
computes in FP32 registers either way. A graph with one maximum stays as it is.

**`read_low_results`** lets others read what a result was widened from.

    logits: f32 = convert(mm, f32)                logits: f32 = convert(mm, f32)
    maximum = amax(logits, [1])            ->     again: f32 = convert(mm, f32)
    return (logits, maximum)                      maximum = amax(again, [1])
                                                  return (logits, maximum)

Inductor writes a result out before it lowers what else reads it, and all of these then read the
FP32 values, twice the bytes of the low ones, which hold the same numbers. Where a product wrote
what was widened, and only fused kernels read the result, each now widens for itself, in registers.

**`scatter_into_sums`** adds rows to what they are added to anyway.

    zeros: f32 = full([50257, 768], 0)
    rows = index_put_accumulate(zeros, tokens, g)
    wide: f32 = convert(mm, f32)                  wide: f32 = convert(mm, f32)
    grad = add(wide, rows)                 ->     grad = index_put_accumulate(wide, tokens, g)

So the gradient of an embedding and that of the head tied to it need no table of zeros, which was
written, read again, and lay in memory beside the sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.dtypes import HALF

_POOLS: dict[Any, int] = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
}
_FORCE = torch.ops.prims.inductor_force_stride_order.default
_WRITTEN_OUT = 25
"""Elements of the largest window that Inductor writes out."""
_MAXIMA = (aten.amax.default, aten.amin.default)
_CONVERT = torch.ops.prims.convert_element_type.default

_REDUCTIONS = (
    *_MAXIMA, aten.sum.default, aten.sum.dim_IntList, aten.gather.default, aten.var_mean.correction,
)  # fmt: skip
"""What Inductor fuses with the elementwise operators that make its operand."""
_SCATTER = aten._unsafe_masked_index_put_accumulate.default
"""What the gradient of an embedding becomes: operand, mask, indices, values."""
_PRODUCTS = (
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.convolution.default,
)  # fmt: skip


def fill_zeros(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    zeros = graph.find_nodes(op="call_function", target=aten._efficientzerotensor.default)
    for node in zeros:
        node.target = aten.full.default
        node.args = (node.args[0], 0, *node.args[1:])
    return bool(zeros)


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


def widen_maxima(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    found = [n for n in graph.nodes if n.target in _MAXIMA and ir.dtype(n) in HALF]
    if len(found) < 2:
        return False
    for node in found:
        low, value = ir.dtype(node), node.args[0]
        with graph.inserting_before(node):
            wide = ir.new_call(graph, _CONVERT, value, torch.float32)
            taken = ir.new_call(graph, node.target, wide, *node.args[1:], **node.kwargs)
            back = ir.new_call(graph, _CONVERT, taken, low)
        node.replace_all_uses_with(back)
        graph.erase_node(node)
    return True


def read_low_results(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    output = graph.output_node()
    changed = False
    for node in graph.find_nodes(op="call_function", target=_CONVERT):
        if ir.dtype(node.args[0]) not in HALF or ir.dtype(node) is not torch.float32:
            continue
        views = list(ir.reached([node], lambda view: filter(_is_view, view.users)))
        returned = [view for view in views if output in view.users]
        others = [user for view in views for user in view.users if user not in (output, *views)]
        if not (len(returned) == 1 and others and _is_product(node.args[0])):
            continue
        if all(ir.is_pointwise(n) or n.target in _REDUCTIONS for n in others):
            output.replace_input_with(returned[0], _again(returned[0], node))
            changed = True
    return changed


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "is_view", False) or node.target is aten.reshape.default


def _is_product(value: Any) -> bool:
    """Whether a kernel that Inductor doesn't write makes the value."""
    while _is_view(value):
        value = value.args[0]
    return value.target in _PRODUCTS


def _again(view: fx.Node, cast: fx.Node) -> fx.Node:
    """The view of a copy of the cast, each node beside the one that it is a copy of."""
    chain = [view]
    while chain[-1] is not cast:
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    made: dict[fx.Node, fx.Node] = {}
    for step in reversed(chain):
        with step.graph.inserting_after(step):
            made[step] = step.graph.node_copy(step, lambda node: made.get(node, node))
    return made[view]


def scatter_into_sums(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    changed = False
    for node in graph.find_nodes(op="call_function", target=_SCATTER):
        zeros, (add, *more) = node.args[0], node.users
        plain = add.target is aten.add.Tensor and len(add.args) == 2 and not (add.kwargs or more)
        rest = [n for n in add.all_input_nodes if n is not node] if plain else []
        others = [n for n in rest if _lie_alike(n, add)]
        if zeros.target is aten.full.default and zeros.args[1] == 0 and others:
            with graph.inserting_before(add):
                add.replace_all_uses_with(ir.new_call(graph, _SCATTER, others[0], *node.args[1:]))
            graph.erase_node(add)
            graph.erase_node(node)
            changed = True
    return changed


def _lie_alike(a: fx.Node, b: fx.Node) -> bool:
    one, other = ir.value(a), ir.value(b)
    alike = one.dtype is other.dtype and ir.same_shape(one.shape, other.shape)
    return alike and one.stride() == other.stride()
