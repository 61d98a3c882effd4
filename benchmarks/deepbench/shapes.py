"""The shapes, from code/kernels in DeepBench's repository, and what each is odd as.

Left out: convolutions over rectangular spectrograms, since those of a profile are square.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpcompile.profile.calls import Point

__all__ = ["CPU", "CUDA", "QUICK", "Shape"]


@dataclass(frozen=True)
class Shape:
    """A call in two sizes.

    Attributes:
        name: with its dims, as DeepBench writes them.
        aligned: the size as named. DeepBench has some that nothing divides: 35 columns.
        odd: the same with one less in each dim that padding looks at.
    """

    name: str
    aligned: Point
    odd: Point


def _gemm(m: int, n: int, k: int) -> Shape:
    """(m, k) times (k, n): DeepBench's n is the batch, here the rows of what goes in."""
    aligned, odd = Point("gemm", (1, n, m, k)), Point("gemm", (1, n, m - 1, k - 1))
    return Shape(f"GEMM {m}x{n}x{k}", aligned, odd)


def _conv(
    side: int, channels: int, batch: int, filters: int, kernel: int, stride: int = 1
) -> Shape:
    positions = (side // stride) ** 2

    def at(inner: int, outer: int) -> Point:
        return Point("conv", (batch, inner, outer, kernel**2, positions, 1), stride)

    fewer = channels - 1 if channels > 3 else channels  # an image has three
    name = f"conv {side}x{side}x{channels}, N={batch}, K={filters}, {kernel}x{kernel}"
    name += f", stride {stride}" * (stride > 1)
    return Shape(name, at(channels, filters), at(fewer, filters - 1))


_CELLS = {4: "LSTM", 3: "GRU", 1: "RNN"}


def _rnn(gates: int, hidden: int, batch: int, steps: int) -> Shape:
    def at(width: int) -> Point:
        return Point("rnn", (batch, steps, width, width, gates))

    name = f"{_CELLS[gates]} {hidden}, N={batch}, T={steps}"
    return Shape(name, at(hidden), at(hidden - 1))


CPU = (
    *(_gemm(1760, n, 1760) for n in (16, 64, 128)),
    *(_gemm(2048, n, 2048) for n in (32, 128)),
    *(_gemm(2560, n, 2560) for n in (16, 64)),
    _gemm(35, 700, 2048), _gemm(35, 700, 2560), _gemm(3072, 64, 1024), _gemm(7680, 16, 2560),
    _conv(54, 64, 8, 64, 3), _conv(27, 128, 8, 128, 3), _conv(14, 128, 8, 256, 3),
    _conv(7, 256, 8, 512, 3), _conv(28, 192, 16, 32, 5), _conv(28, 192, 16, 64, 1),
    _conv(14, 512, 16, 192, 1), _conv(14, 512, 16, 48, 5), _conv(7, 832, 16, 256, 1),
    _conv(108, 3, 8, 64, 3, 2),
    _rnn(1, 1760, 16, 50), _rnn(4, 512, 16, 25), _rnn(4, 512, 64, 25), _rnn(4, 1024, 16, 25),
    _rnn(4, 256, 16, 150), _rnn(3, 1024, 32, 50),
)  # fmt: skip
"""What a step of on two cores takes tens of milliseconds. DeepBench's GRU has T=1500."""

CUDA = (
    *CPU,
    *(_gemm(width, 7000, width) for width in (1760, 2048, 2560, 4096)),
    _gemm(5124, 9124, 1760), _gemm(5124, 9124, 2560), _gemm(35, 8457, 2048),
    _conv(112, 64, 8, 128, 3), _conv(56, 128, 8, 256, 3), _conv(28, 256, 8, 512, 3),
    _conv(224, 3, 16, 64, 7, 2),
    _rnn(1, 2560, 64, 50), _rnn(4, 2048, 64, 25), _rnn(4, 4096, 32, 25), _rnn(3, 2816, 32, 200),
)  # fmt: skip

QUICK = (_gemm(16, 8, 16), _conv(8, 16, 2, 8, 3), _rnn(3, 16, 2, 3))
