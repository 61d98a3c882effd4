"""A device profile: measured times of the expensive operators in each dtype, and predictions.

    profile = Profile("AMD EPYC", "cpu", ..., samples=(Sample("gemm", torch.float32, ...), ...))
    profile.seconds("gemm", torch.bfloat16, {"batch": 1, "m": 1024, "n": 768, "k": 3072})

A profile holds measured points. For any other size, the prediction is a roofline through the
points, corrected by how far the nearby points are above it (`Profile.seconds` has the formula).
This module times nothing and knows no graphs: plain data in, seconds out.

The roofline: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 2009. The weights: Shepard, "A two-dimensional interpolation
function for irregularly-spaced data", ACM 1968.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import MPCompileError, did_you_mean

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a profile may hold samples of."""

MEASURED = "measured"
CEILINGS = "ceilings, not measured"
ORIGINS = (MEASURED, CEILINGS)


@dataclass(frozen=True)
class _Kind:
    """The model of one kind of operator. Each function takes the dims by name.

    Attributes:
        dims: names of the dims, in the order of `Sample.dims`.
        flops: floating-point operations of the forward; a multiply and an add are two.
        elements: tensor elements read and written by the forward, each counted once.
        features: positive numbers that are close if two sizes behave alike (the dims themselves,
            unless said otherwise); distances are taken between their logs.
        flops_of_both, elements_of_both: forward and backward together, as multiples of the forward.
    """

    dims: tuple[str, ...]
    flops: Callable[..., float]
    elements: Callable[..., float]
    features: Callable[..., tuple[float, ...]] = lambda *dims: dims
    flops_of_both: float = 3.0
    elements_of_both: float = 3.0


KINDS: Mapping[str, _Kind] = {
    # (batch, m, k) @ (batch, k, n); with batch 1 the right side is a weight stored (n, k).
    "gemm": _Kind(
        dims=("batch", "m", "n", "k"),
        flops=lambda batch, m, n, k: 2.0 * batch * m * n * k,
        elements=lambda batch, m, n, k: batch * (m * k + k * n + m * n),
    ),
    # kernel: the product of the kernel's sides. positions: number of output positions of a sample.
    "conv": _Kind(
        dims=("batch", "in_channels", "out_channels", "kernel", "positions", "groups"),
        flops=lambda batch, in_channels, out_channels, kernel, positions, groups: (
            2.0 * batch * positions * out_channels * kernel * in_channels / groups
        ),
        elements=lambda batch, in_channels, out_channels, kernel, positions, groups: (
            batch * positions * (in_channels + out_channels)
            + out_channels * kernel * in_channels / groups
        ),
        features=lambda batch, in_channels, out_channels, kernel, positions, groups: (
            batch * positions,
            in_channels / groups,
            out_channels / groups,
            kernel,
            groups,
        ),
    ),
    # batch: sequences times heads. This is the fused kernel, without mask and dropout.
    "attention": _Kind(
        dims=("batch", "queries", "keys", "head"),
        flops=lambda batch, queries, keys, head: 4.0 * batch * queries * keys * head,
        elements=lambda batch, queries, keys, head: 2.0 * batch * (queries + keys) * head,
        flops_of_both=3.5,  # two products forward; backward five, one of them a recomputation
    ),
    # gates: 4 for LSTM, 3 for GRU, 1 for RNN. Weights count as read once, as if they stay in cache.
    "rnn": _Kind(
        dims=("batch", "steps", "input", "hidden", "gates"),
        flops=lambda batch, steps, input, hidden, gates: (
            2.0 * batch * steps * gates * hidden * (input + hidden)
        ),
        elements=lambda batch, steps, input, hidden, gates: (
            batch * steps * (input + (gates + 1) * hidden) + gates * hidden * (input + hidden)
        ),
        # Each cell type has its own kernel, so `gates**8` sets them far apart: 3.3 octaves, 3 to 4.
        features=lambda batch, steps, input, hidden, gates: (batch, steps, input, hidden, gates**8),
    ),
    # bytes: read plus written by one elementwise operation that stores this dtype.
    "copy": _Kind(
        dims=("bytes",),
        flops=lambda bytes: 0.0,
        elements=lambda bytes: 0.0,  # counted in bytes already: see `_bytes`
        elements_of_both=2.0,
    ),
}
"""The kinds of operators that a profile knows, by name."""


@dataclass(frozen=True)
class Sample:
    """One measured point.

    Attributes:
        kind: one of `KINDS`.
        dtype: of every operand.
        dims: sizes, in the order of `KINDS[kind].dims`.
        forward: seconds of one forward.
        total: seconds of one forward and its backward, with every gradient that it has.

    Raises:
        MPCompileError: a value is outside its range.
    """

    kind: str
    dtype: torch.dtype
    dims: tuple[int, ...]
    forward: float
    total: float

    def __post_init__(self) -> None:
        names = _kind(self.kind).dims
        if self.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise MPCompileError(f"sample of {self.dtype}: known are {known}")
        if len(self.dims) != len(names) or any(size < 1 for size in self.dims):
            raise MPCompileError(f"sample of {self.kind}: dims {self.dims} for {', '.join(names)}")
        if not (0 < self.forward <= self.total < math.inf):
            raise MPCompileError(
                f"sample of {self.kind} {self.dims}: forward {self.forward} s, forward and "
                f"backward {self.total} s; need 0 < forward <= both"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The dims by name."""
        return dict(zip(KINDS[self.kind].dims, self.dims, strict=True))


@dataclass(frozen=True)
class Profile:
    """The speed of one device with one build of torch.

    Attributes:
        device: name of the part: a CPU's or a GPU's.
        device_type: its `torch.device.type`, e.g. `"cuda"`.
        torch_version: `torch.__version__`.
        driver: version of the GPU's driver, `""` on a CPU.
        threads: how many threads torch computes with on a CPU; 0 on a GPU.
        samples: the measured points.
        origin: `"measured"`, or `"ceilings, not measured"` if the samples were computed.
    """

    device: str
    device_type: str
    torch_version: str
    driver: str
    threads: int
    samples: tuple[Sample, ...]
    origin: str = MEASURED

    @property
    def is_measured(self) -> bool:
        """Whether its samples are times, and not computed from a data sheet."""
        return self.origin == MEASURED

    def seconds(
        self, kind: str, dtype: torch.dtype, dims: Mapping[str, int], *, backward: bool = True
    ) -> float | None:
        """Predict how long one call takes: forward and backward, or the forward alone.

            seconds  = roofline * slowdown                                         [s]
            roofline = overhead + flops / rate + bytes / bandwidth                 [s]
            slowdown = exp(sum_i w_i ln(seconds_i / roofline_i) / sum_i w_i)       [1]
            w_i      = 1 / (distance_i^4 + 1e-9)                                   [1]

        `overhead` is the shortest measured call [s], `rate` the best measured rate [FLOP/s], both
        of this kind and dtype; `bandwidth` is that of the largest measured copy [bytes/s]. The sum
        runs over the samples of this kind and dtype; `distance_i` is Euclidean between the base-2
        logs of the sizes. So a measured point is reproduced, and between points the achieved rate
        is interpolated. A size outside the measured range has the slowdown of the range's edge.

        Args:
            kind: one of `KINDS`.
            dims: every dim of the kind. One below 1 (an empty tensor) counts as 1.

        Returns:
            Seconds, or None if the profile has no sample of this kind in this dtype.

        Raises:
            MPCompileError: an unknown kind, or dims that the kind doesn't have.
        """
        names = _kind(kind).dims
        if set(dims) != set(names):
            raise MPCompileError(f"{kind} has the dims {', '.join(names)}; got {', '.join(dims)}")
        if (fits := self._fits.get((kind, dtype))) is None:
            return None
        forward, both = fits
        sizes = tuple(max(1, dims[name]) for name in names)
        alone = forward.seconds(sizes)
        # The two fits may cross slightly where a backward is cheap; a backward never saves time.
        return max(alone, both.seconds(sizes)) if backward else alone

    @functools.cached_property
    def _fits(self) -> dict[tuple[str, torch.dtype], tuple[_Fit, ...]]:
        grouped: dict[tuple[str, torch.dtype], list[Sample]] = {}
        for sample in self.samples:
            grouped.setdefault((sample.kind, sample.dtype), []).append(sample)
        return {
            (kind, dtype): tuple(
                _Fit(KINDS[kind], samples, both, self._bandwidth(dtype)) for both in (False, True)
            )
            for (kind, dtype), samples in grouped.items()
        }

    @functools.cached_property
    def bandwidth(self) -> float:
        """The memory's bytes per second, estimated from the largest copy in FP32."""
        return self._bandwidth(torch.float32)

    @functools.cached_property
    def launch(self) -> float:
        """Seconds of the shortest copy: the cost of a kernel that does almost nothing."""
        return min((s.forward for s in self.samples if s.kind == "copy"), default=0.0)

    def _bandwidth(self, dtype: torch.dtype) -> float:
        copies = [s for s in self.samples if s.kind == "copy" and s.dtype is dtype]
        if not copies:
            return math.inf
        largest = max(copies, key=lambda sample: sample.dims)
        return largest.dims[0] / largest.forward


class _Fit:
    """The roofline of the samples of one kind in one dtype, and their slowdowns against it."""

    def __init__(
        self, kind: _Kind, samples: list[Sample], backward: bool, bandwidth: float
    ) -> None:
        self.kind = kind
        self.itemsize = samples[0].dtype.itemsize
        self.bandwidth = bandwidth
        self.flops_factor = kind.flops_of_both if backward else 1.0
        self.bytes_factor = kind.elements_of_both if backward else 1.0
        times = [s.total if backward else s.forward for s in samples]
        self.overhead = min(times)
        self.rate = max(self._flops(s.dims) / t for s, t in zip(samples, times, strict=True))
        self.points = np.array([self._features(s.dims) for s in samples])
        self.low, self.high = self.points.min(axis=0), self.points.max(axis=0)
        rooflines = np.array([self._roofline(s.dims) for s in samples])
        self.slowdowns = np.log(np.array(times) / rooflines)

    def seconds(self, dims: tuple[int, ...]) -> float:
        here = np.clip(self._features(dims), self.low, self.high)
        squared = ((self.points - here) ** 2).sum(axis=1)
        weights = 1.0 / (squared**2 + 1e-9)
        slowdown = math.exp(float(weights @ self.slowdowns) / float(weights.sum()))
        return self._roofline(dims) * slowdown

    def _roofline(self, dims: tuple[int, ...]) -> float:
        flops = self._flops(dims)
        arithmetic = flops / self.rate if flops else 0.0
        return self.overhead + arithmetic + self._bytes(dims) / self.bandwidth

    def _flops(self, dims: tuple[int, ...]) -> float:
        return self.flops_factor * self.kind.flops(*dims)

    def _bytes(self, dims: tuple[int, ...]) -> float:
        if self.kind is KINDS["copy"]:
            return self.bytes_factor * dims[0]
        return self.bytes_factor * self.itemsize * self.kind.elements(*dims)

    def _features(self, dims: tuple[int, ...]) -> np.ndarray:
        return np.log2(np.array(self.kind.features(*dims), dtype=np.float64))


def flops(kind: str, dims: tuple[int, ...]) -> float:
    """Floating-point operations of one forward; 0 for a copy."""
    return _kind(kind).flops(*dims)


def _kind(name: str) -> _Kind:
    if name not in KINDS:
        raise MPCompileError(
            f"unknown kind {name!r}: a profile knows {', '.join(KINDS)}{did_you_mean(name, KINDS)}"
        )
    return KINDS[name]
