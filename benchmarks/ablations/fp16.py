"""What FP16 loses: updates that round away, values that round to zero."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Magnitudes", "lost", "vanishes"]


def vanishes(weight: Tensor, update: Tensor) -> Tensor:
    """Where adding an FP32 update to a weight stored in FP16 leaves it as it was (bool).

    So it is where the update is less than half the distance to the next FP16 number.
    """
    stored = weight.half()
    return (stored.float() + update).half() == stored


class Magnitudes:
    """How many values were seen in each octave: `counts[k]` of 2^k <= |x| < 2^(k+1)."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.zeros = 0

    def add(self, values: Tensor) -> None:
        octaves = torch.frexp(values[values != 0]).exponent - 1
        self.zeros += values.numel() - octaves.numel()
        found, counts = octaves.unique(return_counts=True)
        self.counts.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def shares(self) -> dict[int, float]:
        """Octave -> share of all values, zeros included in "all"."""
        total = self.counts.total() + self.zeros
        return {octave: count / total for octave, count in sorted(self.counts.items())}

    def lost(self, scale: float) -> float:
        """As the function `lost`, of what was seen."""
        return lost(self.shares(), scale)


def lost(shares: Mapping[int, float], scale: float) -> float:
    """The share that is zero in FP16 after multiplication by `scale`, a power of two.

    FP16's smallest number is 2^-24; what is below half of it rounds to zero.

    Args:
        shares: as `Magnitudes.shares` returns them.
    """
    limit = torch.finfo(torch.float16).smallest_normal * 2.0**-11 / scale
    return 1 - sum(share for octave, share in shares.items() if 2.0**octave >= limit)
