"""Lay out channels-last what convolutions on Tensor Cores read. A rewriting pass, on a forward, a
backward, or a graph of both, as Inductor lowers it.

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

from typing import Any

from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.dtypes import HALF
from mpcompile.torch_inside.graphs import schema
from mpcompile.torch_inside.inductor import results_of_callers
from mpcompile.torch_inside.names import OpOverload

# Of each operator: where among its arguments the images are, the weight last; and its groups.
_CONVOLUTIONS: dict[Any, tuple[tuple[int, ...], int]] = {
    aten.convolution.default: ((0, 1), 8),
    aten.convolution_backward.default: ((0, 1, 2), 9),
}
_BY_STRIDES = {"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"}


def lay_low_images(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    found = [node for node in graph.nodes if node.target in _CONVOLUTIONS]
    if any(map(_is_grouped, found)):
        return False
    read = [image for node in found if _is_low(node) for image in _images(node)]
    images = [image for image in dict.fromkeys(read) if _has_layout(image)]
    for image in images:
        _lay(image)
    return bool(images)


def _images(convolution: fx.Node) -> list[Any]:
    places, _ = _CONVOLUTIONS[convolution.target]
    return [convolution.args[at] for at in places]


def _is_grouped(convolution: fx.Node) -> bool:
    """Whether it works on groups of several channels each: depthwise ones gain like others."""
    _, place = _CONVOLUTIONS[convolution.target]
    groups: Any = convolution.args[place]
    return groups > 1 and ir.value(_images(convolution)[-1]).shape[1] > 1


def _is_low(convolution: fx.Node) -> bool:
    weight = ir.value(_images(convolution)[-1])
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
