"""Lay images out channels-last where convolutions run so. Rewriting passes, on a graph as Inductor
lowers it; each returns whether it changed anything.

**`lay_channels_last`**: a graph of forward and backward, for oneDNN.

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

**`lay_low_images`**: what convolutions on Tensor Cores read, in a forward, a backward, or a graph
of both.

    relu: f16 = relu(norm)                       relu: f16 = relu(norm)
                                                 laid: f16 = force_stride_order(relu, [.., 1, ..])
    conv = convolution(relu, w, ...)        ->   conv = convolution(laid, w, ...)

cuDNN's kernels for Tensor Cores read and write channels-last. Around one that is handed anything
else, cuDNN transposes what it reads and what it returns: forward, and twice backward. Inductor lays
images out channels-last by itself, but in no graph whose convolutions have at most 64 channels, nor
with a convolution that halves its channels, as in a U-Net, nor with a symbolic batch: by what was
measured for graphs of any dtype. So each image that a low convolution reads is laid out here; a
convolution's result follows its operand, and Inductor's own code follows either. Where Inductor
lays them out by itself, this says the same once more.

The images are a convolution's input and its weight and, backward, the gradient of its result. Other
operators read the one that is laid out as well, or it would be stored twice: not those that read
memory by given strides or write to it, and not those of other libraries, whose layouts are part of
what they were told. What is stored for the backward is the one that is laid out; a result for the
caller is not, since it has the caller's strides.

Left alone are images of one channel or one pixel (both layouts are the same memory), and graphs
with a convolution in groups of several channels: torch has measured one that takes 31 times as long
channels-last (`decide_layout_opt` in torch/_inductor/graph.py).

Contract. An image whose channels, height or width are no numbers is left as it is.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.dtypes import HALF
from mpcompile.torch_inside.graphs import schema
from mpcompile.torch_inside.inductor import results_of_callers
from mpcompile.torch_inside.names import OpOverload

# -- lay_channels_last -----------------------------------------------------------------------------

_LEAST = 16  # channels: as many FP32 numbers as a cache line, or a vector of AVX512, holds
_POOLS_AND_JOINS = {
    "aten::_adaptive_avg_pool2d", "aten::avg_pool2d", "aten::cat",
    "aten::max_pool2d_with_indices", "prims::_low_memory_max_pool_with_offsets",
}  # fmt: skip


def lay_channels_last(graph: fx.Graph) -> bool:
    """Rewrite the graph; see the module."""
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
        # Its result is memory of its own, channels-last if an operand is.
        keeps_layout = ir.is_pointwise(node) or ir.op_name(node) in _POOLS_AND_JOINS
        if (
            node.target is aten.convolution.default
            or (keeps_layout and (of_image or node in read))
            or (node.target is operator.getitem and of_image)
        ):
            found[node] = None
    return list(found)


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


# -- lay_low_images --------------------------------------------------------------------------------

# Of each operator: where among its arguments the images are, the weight last; and its groups.
_CONVOLUTIONS: dict[Any, tuple[tuple[int, ...], int]] = {
    aten.convolution.default: ((0, 1), 8),
    aten.convolution_backward.default: ((0, 1, 2), 9),
}
_BY_STRIDES = {"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"}


def lay_low_images(graph: fx.Graph) -> bool:
    """Rewrite the graph; see the module."""
    found = [node for node in graph.nodes if node.target in _CONVOLUTIONS]
    if any(map(_is_grouped, found)):
        return False
    read = [image for node in found if _is_low(node) for image in _images_of(node)]
    images = [image for image in dict.fromkeys(read) if _has_layout(image)]
    for image in images:
        _lay(image)
    return bool(images)


def _images_of(convolution: fx.Node) -> list[Any]:
    places, _ = _CONVOLUTIONS[convolution.target]
    return [convolution.args[at] for at in places]


def _is_grouped(convolution: fx.Node) -> bool:
    """Whether it works on groups of several channels each: depthwise ones gain like others."""
    _, place = _CONVOLUTIONS[convolution.target]
    groups: Any = convolution.args[place]
    return groups > 1 and ir.value(_images_of(convolution)[-1]).shape[1] > 1


def _is_low(convolution: fx.Node) -> bool:
    weight = ir.value(_images_of(convolution)[-1])
    return weight.dtype in HALF and weight.dim() == 4


def _has_layout(image: fx.Node) -> bool:
    """Whether its layout is not said yet, and is worth saying."""
    _, channels, *pixels = ir.value(image).shape
    known = all(isinstance(size, int) for size in (channels, *pixels))
    return known and channels > 1 and pixels != [1, 1] and ir.op_name(image) != ir.FORCE_STRIDES


def _lay(image: fx.Node) -> None:
    output = image.graph.output_node()
    results: Any = output.args[0]
    laid = ir.laid_channels_last(image)
    image.replace_all_uses_with(laid, delete_user_cb=lambda user: _reads_any(user, laid))
    callers = results_of_callers(image.graph)
    stored = [laid if r is image and i not in callers else r for i, r in enumerate(results)]
    output.args = (tuple(stored),)


def _reads_any(user: fx.Node, laid: fx.Node) -> bool:
    """Whether a reader gets the same values from either layout, and writes to none."""
    if user is laid or not isinstance(user.target, OpOverload) or schema(user.target).is_mutable:
        return False
    return user.target.namespace in ("aten", "prims") and ir.op_name(user) not in _BY_STRIDES
