"""Lay images out channels-last. A rewriting pass, on a graph of forward and backward as Inductor
lowers it.

    relu: bf16 = relu(norm)                      relu: bf16 = relu(norm)
                                                 laid: bf16 = force_stride_order(relu, [.., 1, ..])
    conv = convolution(relu, w, ...)        ->   conv = convolution(laid, w, ...)
    grads = convolution_backward(g, relu, w)     grads = convolution_backward(g, laid, w)

oneDNN's convolutions read and write channels-last, and Inductor chooses the layouts between them.
But for what a `convolution_backward` reads it takes the strides that the value was traced with, as
it does for the results of a forward compiled by itself, where they are strides that its own code
made. In a graph that holds forward and backward those are of no kernel: there each image is stored
twice, as it was traced and, for the convolution, channels-last, and pools read across the grain.

The images are the operands and results of convolutions and what elementwise operators, pools and
concatenations make of them. One is laid out if an operator that reads it from memory does so, and
another one reads it too: what is read once, Inductor lays out as its reader wants it. Nothing is
stored that was not stored before, and no operator computes anything else; sums may run in another
order. The strides of results stay the caller's: Inductor keeps them itself.

Left alone are views, since one that is laid out would be a copy, which a later write to its base
would not reach; images of one channel or one pixel: both layouts are the same memory, and torch's
convolutions read off the strides which one their result has; and images of few channels, which fill
no vector, as the pixels of a row do (the SSD of `python -m benchmarks run peers` was slower so).

Contract. An image whose sizes are no numbers is left as it is.
"""

from __future__ import annotations

import functools
import operator

from torch import fx

from mpcompile import ir
from mpcompile.ir import aten

_LEAST = 16  # channels: as many FP32 numbers as a cache line, or a vector of AVX512, holds
_POOLS_AND_JOINS = {
    "aten::_adaptive_avg_pool2d", "aten::avg_pool2d", "aten::cat",
    "aten::max_pool2d_with_indices", "prims::_low_memory_max_pool_with_offsets",
}  # fmt: skip


def lay_channels_last(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    if not graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        return False
    chosen = [node for node in _images(graph) if _is_stored(node)]
    for node in chosen:
        laid = ir.laid_channels_last(node)
        node.replace_all_uses_with(laid, functools.partial(operator.is_not, laid))
    return bool(chosen)


def _images(graph: fx.Graph) -> list[fx.Node]:
    """What is an image, in the order of the graph."""
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    read = {node.args[0] for node in convolutions}
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        of_image = any(operand in found for operand in node.all_input_nodes)
        if (
            node.target is aten.convolution.default
            or (_keeps_layout(node) and (of_image or node in read))
            or (node.target is operator.getitem and of_image)
        ):
            found[node] = None
    return list(found)


def _keeps_layout(node: fx.Node) -> bool:
    """Whether the result is memory of its own, channels-last if an operand is."""
    return ir.is_pointwise(node) or ir.op_name(node) in _POOLS_AND_JOINS


def _is_stored(node: fx.Node) -> bool:
    """Whether it has a layout that is worth choosing, and several readers."""
    value = ir.tensor(node)
    if value is None or value.dim() != 4 or len(node.users) < 2:
        return False
    _, channels, height, width = value.shape
    return (
        all(isinstance(size, int) for size in value.shape)
        and channels >= _LEAST
        and height * width > 1
        and any(_reads_memory(user, node) for user in node.users)
    )


def _reads_memory(reader: fx.Node, node: fx.Node) -> bool:
    if reader.target is aten.convolution.default:
        return reader.args[0] is node
    return ir.op_name(reader) in _POOLS_AND_JOINS
