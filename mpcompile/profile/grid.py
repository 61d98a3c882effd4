"""The sizes that are measured: those of common models, many small ones, spanning each dim.

Every dim has a smallest and a largest size here. A prediction between them is only as good as the
nearest points, so the points are a factor of 4 apart where speed changes slowly, and 2 apart
(widths from 32 to 256) where the low dtypes overtake FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Point", "points"]


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
