"""The copies counted around a convolution whose images are not channels-last."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import ir

from benchmarks.cuda_parts.transposes import transposed

CONVOLUTION = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default
LAST = torch.channels_last
PLAIN = torch.contiguous_format


def image(*size: int, layout: Any = PLAIN, dtype: Any = torch.float16) -> Any:
    memory = torch.empty(size, dtype=dtype, device="meta")
    if memory.dim() == 4:
        memory = memory.contiguous(memory_format=layout)
    described = SimpleNamespace(dtype=dtype, size=memory.shape, stride=memory.stride())
    return SimpleNamespace(get_layout=lambda: described, get_size=lambda: memory.shape)


def forward(x: Any, weight: Any, result: Any, groups: int = 1) -> list[int]:
    kernel = SimpleNamespace(inputs=[x, weight], get_layout=result.get_layout)
    arguments = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    return list(transposed(kernel, CONVOLUTION, arguments))


def test_channels_last_images_are_left_as_they_are() -> None:
    x, weight = image(2, 8, 5, 5, layout=LAST), image(4, 8, 3, 3, layout=LAST)
    assert forward(x, weight, image(2, 4, 5, 5, layout=LAST)) == []


def test_two_operands_and_the_result_are_transposed() -> None:
    x, weight, result = image(2, 8, 5, 5), image(4, 8, 3, 3), image(2, 4, 5, 5)
    # Two bytes an element, read and written.
    assert forward(x, weight, result) == [4 * 2 * 8 * 25, 4 * 4 * 8 * 9, 4 * 2 * 4 * 25]


def test_beside_a_channels_last_operand_the_other_is_laid_out() -> None:
    x, weight = image(2, 8, 5, 5, layout=LAST), image(4, 8, 3, 3)
    assert forward(x, weight, image(2, 4, 5, 5, layout=LAST)) == [4 * 4 * 8 * 9]


def test_one_channel_and_one_pixel_have_either_layout() -> None:
    x, weight, result = image(2, 1, 5, 5), image(4, 1, 5, 5), image(2, 4, 1, 1)
    assert forward(x, weight, result) == []


@pytest.mark.parametrize("how", ["FP32", "groups", "one dimension"])
def test_kernels_for_either_layout_transpose_nothing(how: str) -> None:
    dtype = torch.float32 if how == "FP32" else torch.float16
    sizes = [(2, 8, 5, 5), (4, 8, 3, 3), (2, 4, 5, 5)]
    if how == "one dimension":
        sizes = [size[:3] for size in sizes]
    images = [image(*size, dtype=dtype) for size in sizes]
    assert forward(*images, groups=2 if how == "groups" else 1) == []


def test_of_a_backward_the_gradients_that_were_asked_for_count() -> None:
    grad, x, weight = image(2, 4, 5, 5), image(2, 8, 5, 5), image(4, 8, 3, 3)
    kernel = object.__new__(ir.FallbackKernel)
    kernel.inputs, kernel.outputs = [grad, x, weight], (None, image(4, 8, 3, 3), image(4))
    arguments = (grad, x, weight, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True])
    assert list(transposed(kernel, BACKWARD, arguments)) == [
        4 * 2 * 4 * 25, 4 * 2 * 8 * 25, 4 * 4 * 8 * 9, 4 * 4 * 8 * 9,
    ]  # fmt: skip
