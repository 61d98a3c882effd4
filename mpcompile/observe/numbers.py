"""The numbers of a tensor, in a few words: magnitudes, and what a low dtype makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ..ir import tensors_of

# Binary exponents that a histogram tells apart: floor(log2 |x|), clamped into this range.
EXPONENTS = range(-80, 65)


@dataclass(frozen=True)
class Numbers:
    """Of all elements of one or several tensors.

    Attributes:
        count, zeros, infs, nans: how many elements there are, and how many of a kind.
        amax: the largest finite magnitude; 0 if there is none.
        amin: the smallest finite magnitude above zero; infinity if there is none.
    """

    count: int = 0
    zeros: int = 0
    infs: int = 0
    nans: int = 0
    amax: float = 0.0
    amin: float = float("inf")

    @classmethod
    def of(cls, value: object) -> Numbers:
        """Read them off the floating-point tensors in a value; waits for the device once each."""
        found = cls()
        for tensor in floats_of(value):
            found += cls._of_tensor(tensor)
        return found

    @classmethod
    def _of_tensor(cls, tensor: torch.Tensor) -> Numbers:
        size = tensor.abs().double()
        finite = size.isfinite()
        amax = torch.where(finite, size, 0).max()
        amin = torch.where(finite & (size > 0), size, torch.inf).min()
        counts = [(size == 0).sum(), size.isinf().sum(), size.isnan().sum()]
        zeros, infs, nans, most, least = torch.stack([*counts, amax, amin]).tolist()
        return cls(tensor.numel(), int(zeros), int(infs), int(nans), most, least)

    @property
    def bad(self) -> int:
        """How many elements are not finite."""
        return self.infs + self.nans

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(
            self.count + other.count,
            self.zeros + other.zeros,
            self.infs + other.infs,
            self.nans + other.nans,
            max(self.amax, other.amax),
            min(self.amin, other.amin),
        )


@dataclass(frozen=True)
class Shares:
    """What a low dtype makes of exact values, as shares (0 to 1) of those that are not zero.

    Attributes:
        flushed: rounded to zero.
        subnormal: kept, but with fewer bits than the dtype has.
        overflowed: rounded to infinity.
        count: how many values are not zero.
    """

    flushed: float = 0.0
    subnormal: float = 0.0
    overflowed: float = 0.0
    count: int = field(default=0, compare=False)

    @classmethod
    def of(cls, exact: Iterable[torch.Tensor], low: torch.dtype, scale: float = 1.0) -> Shares:
        """Of exact (FP64) values that are multiplied by `scale` and rounded to `low`."""
        counts = torch.zeros(4, dtype=torch.float64)
        tiny = torch.finfo(low).tiny
        for tensor in exact:
            size = tensor.double().abs() * scale
            size = size[size.isfinite() & (size > 0)]
            rounded = size.to(low)
            flushed = rounded == 0
            kinds = [flushed, (size < tiny) & ~flushed, rounded.isinf()]
            counts += torch.stack([kind.sum() for kind in (*kinds, size > 0)]).cpu()
        flushed, subnormal, overflowed, total = counts.tolist()
        if not total:
            return cls()
        return cls(flushed / total, subnormal / total, overflowed / total, count=int(total))


def histogram(tensor: torch.Tensor) -> torch.Tensor:
    """How many finite nonzero elements have which binary exponent: int64, one for each of
    `EXPONENTS`, on the CPU.
    """
    size = tensor.detach().abs().double()
    size = size[size.isfinite() & (size > 0)]
    places = size.log2().floor().clamp(EXPONENTS[0], EXPONENTS[-1]).long() - EXPONENTS[0]
    return torch.bincount(places.flatten(), minlength=len(EXPONENTS)).cpu()


def floats_of(value: object) -> list[torch.Tensor]:
    """The floating-point tensors in a value, detached, without empty ones; of a sparse one what it
    stores.
    """
    found = [t.detach() for t in tensors_of(value) if t.is_floating_point()]
    dense = [t.coalesce().values() if t.is_sparse else t for t in found]
    return [t for t in dense if t.numel()]
