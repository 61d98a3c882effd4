"""The copies around a convolution on Tensor Cores whose images are not all channels-last.

cuDNN's kernels for Tensor Cores work on channels-last images. Handed others, cuDNN transposes what
it reads before its kernel and what it returns after it, in kernels of its own (NVIDIA, "Optimizing
Convolutional Layers", on tensor layouts). Where an operand is channels-last, torch lays the others
out before it calls cuDNN, and the results are channels-last as they come
(`cudnn_conv_suggest_memory_format` in ATen/native/ConvUtils.h).

A gradient that both halves of a backward read is transposed by each; it is counted once here, so
that the sum is rather too low. In groups of several channels, and in FP32, there are kernels for
either layout: none is counted.

Torch internals used here were read in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor import ir

_LOW = (torch.float16, torch.bfloat16)
# Of each operator: how many images it reads, and where its groups stand.
_CONVOLUTIONS: dict[Any, tuple[int, int]] = {
    torch.ops.aten.convolution.default: (2, 8),
    torch.ops.aten.convolution_backward.default: (3, 9),
}


def transposed(kernel: Any, operator: Any, arguments: tuple[Any, ...]) -> Iterator[int]:
    """The bytes that each copy moves, reading and writing.

    Args:
        kernel: the convolution as Inductor calls it.
        arguments: of the operator, in the graph that Inductor was given.
    """
    if operator not in _CONVOLUTIONS:
        return
    number, groups = _CONVOLUTIONS[operator]
    if arguments[groups] != 1:
        return
    read = [_Image(given) for given in kernel.inputs[:number]]
    if any(image.dtype not in _LOW or len(image.size) != 4 for image in read):
        return
    others = [image for image in read if not image.is_channels_last]
    if not others:
        return
    if all(image.is_contiguous for image in read):
        others += [image for image in map(_Image, _results(kernel)) if not image.is_channels_last]
    yield from (2 * image.bytes for image in others)


class _Image:
    """Four-dimensional memory; that of one channel or one pixel has either layout."""

    def __init__(self, of: Any) -> None:
        layout = of.get_layout()
        self.dtype: torch.dtype = layout.dtype
        self.size, stride = ([int(n) for n in dims] for dims in (layout.size, layout.stride))
        memory = torch.empty_strided(self.size, stride, dtype=self.dtype, device="meta")
        self.bytes = memory.numel() * memory.element_size()
        self.is_contiguous = memory.is_contiguous()
        self.is_channels_last = len(self.size) == 4 and memory.is_contiguous(
            memory_format=torch.channels_last
        )


def _results(kernel: Any) -> list[Any]:
    """The images that it returns: a backward returns the gradients that were asked for, and that of
    a bias is none.
    """
    if not isinstance(kernel, ir.FallbackKernel):
        return [kernel]
    return [one for one in kernel.outputs if one is not None and len(one.get_size()) == 4]
