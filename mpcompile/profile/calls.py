"""The sizes that a profile measures, and the calls that it times there, in the form in which a
compiled program makes them.

- Products and convolutions are aten calls without autograd, forward and each gradient: these are
  what the compiled forward and backward run, and autograd's own cost is the same for every dtype.
- Weights already have the dtype; casting them is memory traffic, which "copy" measures.
- Convolutions are channels-last, whatever layout the user's model has: Inductor gives every
  convolution that layout on oneDNN and cuDNN (`decide_layout_opt` in torch/_inductor/graph.py).
- Attention and recurrent layers are torch's own kernels and their gradients, through autograd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

aten = torch.ops.aten

# -- sizes -----------------------------------------------------------------------------------------
#
# Those of common models, many small ones, spanning each dim.
#
# Every dim has a smallest and a largest size here. A prediction between them is only as good as the
# nearest points, so the points are a factor of 4 apart where speed changes slowly, and 2 apart
# (widths from 32 to 256) where the low dtypes overtake FP32.


@dataclass(frozen=True)
class Point:
    """A size to measure.

    Attributes:
        kind, dims: as in `Sample`.
        stride: of a convolution, the same on both sides; the input is larger by that factor.
    """

    kind: str
    dims: tuple[int, ...]
    stride: int = 1


# (m, n, k): tokens or samples by features; 4099 is a vocabulary size that nothing divides.
_GEMMS = (
    *((m, width, width) for m in (64, 256, 1024, 4096) for width in (32, 64, 128, 256, 512, 1024)),
    *((m, n, k) for m in (64, 1024) for n, k in ((256, 1024), (1024, 256))),
    *((16, 16, 16), (32, 32, 32), (64, 10, 128), (1024, 10, 64), (64, 512, 64), (1024, 64, 512)),
    *((64, 4099, 256), (1024, 4099, 256), (256, 256, 4099), (256, 100, 300)),
    *((8, 8, 8), (32, 10, 32), (128, 96, 32), (128, 128, 32), (128, 32, 128), (256, 128, 64)),
)
# (batch, m, n, k): the two products of attention, in the forward, or where it is written out.
_BATCHED = (
    *((32, 128, 128, 64), (32, 128, 64, 128), (8, 64, 64, 32), (64, 128, 128, 32)),
    *((128, 32, 32, 32), (8, 512, 512, 64), (8, 512, 64, 512), (32, 64, 16, 64)),
    *((8, 32, 32, 16), (8, 32, 16, 32), (2, 8, 8, 8)),
)
# (batch, in_channels, out_channels, kernel, positions, groups): maps and kernels are square.
_CONVS = (
    # ResNet-50: 3x3 and 1x1, and the first layers of image models
    *((4, 64, 64, 9, 56 * 56, 1), (4, 128, 128, 9, 28 * 28, 1), (4, 256, 256, 9, 14 * 14, 1)),
    *((8, 512, 512, 9, 7 * 7, 1), (4, 64, 256, 1, 56 * 56, 1), (4, 256, 64, 1, 56 * 56, 1)),
    *((4, 512, 128, 1, 28 * 28, 1), (4, 1024, 256, 1, 14 * 14, 1), (8, 512, 2048, 1, 7 * 7, 1)),
    *((16, 3, 64, 9, 32 * 32, 1), (16, 1, 32, 9, 28 * 28, 1)),
    # small images
    *((16, 16, 16, 9, 32 * 32, 1), (16, 32, 32, 9, 16 * 16, 1), (16, 64, 64, 9, 8 * 8, 1)),
    *((16, 16, 32, 9, 14 * 14, 1), (16, 128, 128, 9, 8 * 8, 1)),
    # U-Net
    *((4, 32, 32, 9, 64 * 64, 1), (4, 128, 64, 9, 32 * 32, 1), (4, 32, 1, 1, 64 * 64, 1)),
    # depthwise and grouped
    *((8, 64, 64, 9, 28 * 28, 64), (8, 256, 256, 9, 14 * 14, 256), (4, 128, 128, 9, 28 * 28, 32)),
)
_STRIDED = (  # the stem of a ResNet, the patches of a ViT
    Point("conv", (4, 3, 64, 49, 112 * 112, 1), stride=2),
    Point("conv", (8, 3, 192, 256, 14 * 14, 1), stride=16),
)
# (batch * heads, queries, keys, head)
_ATTENTION = (
    *((16, 128, 128, 32), (64, 128, 128, 64), (32, 64, 64, 32), (16, 256, 256, 64)),
    *((16, 512, 512, 64), (16, 128, 512, 64), (4, 1024, 1024, 64), (64, 32, 32, 16)),
    *((8, 64, 64, 32), (8, 32, 32, 16), (2, 8, 8, 8)),
)
# (batch, steps, input, hidden, gates)
_RNNS = (
    *((32, 32, width, width, 4) for width in (32, 64, 128, 256, 512)),
    *((8, 16, 64, 64, 4), (8, 16, 32, 32, 4), (2, 8, 16, 16, 4)),
    *((8, 64, 64, 128, 4), (32, 16, 512, 256, 4), (64, 16, 256, 256, 4)),
    *((32, 32, width, width, gates) for width in (64, 128, 256) for gates in (3, 1)),
)
_COPIES = tuple(2**power for power in range(12, 29, 2))

# Sizes that keep a GPU busy; they would take a CPU minutes.
_LARGE = (
    *(Point("gemm", (1, 4096, *nk)) for nk in ((4096, 1024), (1024, 4096), (4096, 4096))),
    *(Point("gemm", (1, 16384, *nk)) for nk in ((1024, 1024), (4096, 1024), (4096, 4096))),
    *(Point("gemm", (1, 8192, *nk)) for nk in ((50257, 768), (50304, 768), (8192, 8192))),
    *(Point("gemm", dims) for dims in ((192, 1024, 1024, 64), (192, 1024, 64, 1024))),
    *(Point("conv", (128, a, a, 9, side * side, 1)) for a, side in ((64, 56), (256, 14))),
    *(Point("conv", (128, a, b, 1, 196, 1)) for a, b in ((1024, 256), (256, 1024))),
    Point("conv", (128, 3, 64, 49, 112 * 112, 1), stride=2),
    *(Point("attention", (192, length, length, 64)) for length in (128, 512, 1024, 2048)),
    *(Point("rnn", (64, 64, width, width, 4)) for width in (512, 1024)),
    Point("copy", (2**30,)),
)  # fmt: skip


def points(*, large: bool) -> Sequence[Point]:
    """The sizes to measure; with `large`, also those that only an accelerator needs to be busy."""
    common = (
        *(Point("gemm", (1, *dims)) for dims in _GEMMS),
        *(Point("gemm", dims) for dims in _BATCHED),
        *(Point("conv", dims) for dims in _CONVS),
        *_STRIDED,
        *(Point("attention", dims) for dims in _ATTENTION),
        *(Point("rnn", dims) for dims in _RNNS),
        *(Point("copy", (size,)) for size in _COPIES),
    )
    return (*common, *_LARGE) if large else common


# -- calls -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """The two timed calls at one point in one dtype: the forward, and forward with backward."""

    forward: Callable[[], object]
    both: Callable[[], object]


def build(point: Point, dtype: torch.dtype, device: torch.device) -> Calls:
    """Make the operands of one point and the calls on them.

    Raises:
        RuntimeError: the memory of the device is too small.
    """
    conv = functools.partial(_conv, stride=point.stride)
    builders: dict[str, Callable[..., Calls]] = {
        "gemm": _gemm, "conv": conv, "attention": _attention, "rnn": _rnn, "copy": _copy,
    }  # fmt: skip

    def random(*shape: int) -> Tensor:
        # Small, so that sums over thousands of products stay finite in FP16.
        return torch.rand(shape, device=device).sub_(0.5).mul_(0.5).to(dtype)

    return builders[point.kind](random, *point.dims)


_Random = Callable[..., Tensor]


def _gemm(random: _Random, batch: int, m: int, n: int, k: int) -> Calls:
    if batch > 1:
        product, left, right = torch.bmm, random(batch, m, k), random(batch, k, n)
        gradient = random(batch, m, n)
    else:
        product, left, right = torch.mm, random(m, k), random(n, k).t()
        gradient = random(m, n)

    def both() -> tuple[Tensor, ...]:
        # The weight's gradient is computed in the layout in which the weight is stored.
        to_weight = (left.mT, gradient) if batch > 1 else (gradient.t(), left)
        return product(left, right), product(gradient, right.mT), product(*to_weight)

    return Calls(lambda: product(left, right), both)


def _conv(
    random: _Random, batch: int, in_channels: int, out_channels: int, kernel: int, positions: int,
    groups: int, *, stride: int,
) -> Calls:  # fmt: skip
    side, width = math.isqrt(positions), math.isqrt(kernel)
    assert (side * side, width * width) == (positions, kernel), "the grid has squares only"
    layout = torch.channels_last
    x = random(batch, in_channels, side * stride, side * stride).contiguous(memory_format=layout)
    weight = random(out_channels, in_channels // groups, width, width).contiguous(
        memory_format=layout
    )
    padding = 0 if stride >= width else width // 2
    where = [[stride, stride], [padding, padding], [1, 1], False, [0, 0], groups]

    def forward() -> Tensor:
        output: Tensor = aten.convolution.default(x, weight, None, *where)
        return output

    gradient = torch.empty_like(forward()).copy_(random(batch, out_channels, side, side))

    def both() -> tuple[Tensor, ...]:
        mask = [True, True, False]
        return forward(), *aten.convolution_backward.default(
            gradient, x, weight, None, *where, mask
        )

    return Calls(forward, both)


def _attention(random: _Random, batch: int, queries: int, keys: int, head: int) -> Calls:
    q, k, v = (random(1, batch, n, head).requires_grad_() for n in (queries, keys, keys))
    gradient = random(1, batch, queries, head)
    forward = functools.partial(nn.functional.scaled_dot_product_attention, q, k, v)
    return _through_autograd(forward, (q, k, v), gradient)


def _through_autograd(
    forward: Callable[[], Tensor], wanted: Sequence[Tensor], gradient: Tensor
) -> Calls:
    return Calls(forward, lambda: torch.autograd.grad(forward(), wanted, gradient))


_LAYERS: dict[int, Callable[[int, int], nn.RNNBase]] = {4: nn.LSTM, 3: nn.GRU, 1: nn.RNN}


def _rnn(random: _Random, batch: int, steps: int, input: int, hidden: int, gates: int) -> Calls:
    x = random(steps, batch, input).requires_grad_()
    gradient = random(steps, batch, hidden)
    layer = _LAYERS[gates](input, hidden).to(x.device, x.dtype)
    return _through_autograd(lambda: layer(x)[0], (x, *layer.parameters()), gradient)


def _copy(random: _Random, bytes: int) -> Calls:
    """One read and one write of half the bytes each, with arithmetic like elementwise code."""
    x = random(1)
    x = x.expand(max(1, bytes // (2 * x.element_size()))).contiguous()
    out = torch.empty_like(x)

    def forward() -> Tensor:
        return torch.add(x, 1.0, out=out)

    return Calls(forward, lambda: (forward(), forward()))
