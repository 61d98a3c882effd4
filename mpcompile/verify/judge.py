"""Is a compiled value right? By rounding, not by a constant.

Right is what is off from the exact value by at most three times what an uncompiled value is: the
largest error of an element, and of a row and of a column relative to what stands in it (a mean over
all hides a wrong tile). A unit in the last place of the value's dtype is always allowed. What isn't
finite where both other values are is wrong at once. Decisions (masks, indices) may be others in as
many places, three times over, as the uncompiled ones are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .reference import Pair

__all__ = ["Errors", "errors_of", "is_vacuous", "off"]

TIMES = 3.0
_FEW = 64
"""Elements up to which a value's own error is luck: a sum of many that nearly cancelled."""


@dataclass(frozen=True)
class Errors:
    """How far two values are from the exact one; what is allowed without asking is taken off.

    Attributes:
        compiled: of the compiled value: the largest error of an element, row and column.
        uncompiled: of the uncompiled one.
        finite: whether the compiled one is finite wherever it has to be.
    """

    compiled: tuple[float, ...]
    uncompiled: tuple[float, ...]
    finite: bool = True

    def __or__(self, other: Errors) -> Errors:
        """With another uncompiled value taken into account: the larger error is what may be."""
        most = tuple(map(max, self.uncompiled, other.uncompiled))
        return Errors(self.compiled, most, self.finite)

    @property
    def ratio(self) -> float:
        """The compiled value's error in units of the uncompiled one's, at most; 1/3 may be 0/0."""
        pairs = zip(self.compiled, self.uncompiled, strict=True)
        found = [0.0 if c == 0 else c / u if u else math.inf for c, u in pairs]
        return max(found, default=0.0) if self.finite else math.inf

    @property
    def right(self) -> bool:
        """Whether the compiled value is right."""
        return self.ratio <= TIMES


def errors_of(compiled: torch.Tensor, pair: Pair) -> Errors:
    """Compare a compiled value with the uncompiled and the exact one, all of one shape."""
    low, wide, eps = pair
    if compiled.numel() == 0:
        return Errors((), ())
    if compiled.is_complex():
        compiled, low, wide = map(torch.view_as_real, (compiled, low, wide))
    if not compiled.dtype.is_floating_point:
        wide = wide.to(low.dtype)
        mine, theirs = ((value != wide).sum().item() for value in (compiled, low))
        # Where nothing is rounded nothing may differ; else some of what is nearly equal may.
        free = math.ceil(4 * eps * compiled.numel()) if eps > 1e-5 else 0
        return Errors((float(max(0, mine - free)),), (float(theirs),))
    dtype = compiled.dtype
    exact = torch.promote_types(wide.dtype, torch.float32)
    c, u, w = (value.to(exact) for value in (compiled, low, wide))
    rounded = w.to(dtype)
    must = rounded.isfinite() & low.isfinite()
    finite = bool(compiled.isfinite()[must].all()) if not bool(compiled.isfinite().all()) else True
    meant = rounded.isfinite()
    zero = w.new_zeros(())
    scale = torch.where(meant, w.abs(), zero)
    unit = torch.finfo(dtype).eps * scale + torch.finfo(dtype).tiny
    off_c = torch.where(meant & c.isfinite(), ((c - w).abs() - unit).clamp_min(0), zero)
    off_u = torch.where(meant & u.isfinite(), (u - w).abs(), zero)
    if compiled.numel() <= _FEW:
        off_c = (off_c - 2 * eps * scale).clamp_min(0)
    mine = [off_c.max().item(), *_relative(off_c, scale)]
    return Errors(tuple(mine), (off_u.max().item(), *_relative(off_u, scale)), finite)


def _relative(off: torch.Tensor, scale: torch.Tensor) -> Iterator[float]:
    """The largest error of a row and of a column, relative to what stands in it."""
    if off.dim() < 2:
        return
    off, scale = (value.reshape(-1, value.shape[-1]) for value in (off, scale))
    for dim in (0, 1):
        if off.shape[dim] < 16:
            yield 0.0
            continue
        size = scale.square().mean(dim).sqrt()
        found = off.square().mean(dim).sqrt() / size
        yield torch.where(size > 0, found, 0.0).max().item()


def is_vacuous(value: torch.Tensor) -> bool:
    """Whether a value proves nothing: it is the same everywhere, or zero."""
    if value.numel() == 0:
        return False
    first = value.flatten()[0]
    return bool((value == first).all()) and (value.numel() > 1 or not bool(first))


def off(errors: Errors) -> str:
    """How far a wrong value is off, in a few words."""
    if not errors.finite:
        return "not finite where it has to be"
    if math.isinf(errors.ratio):
        return "off where nothing is rounded"
    return f"off by {errors.ratio:.3g} times what rounding does"
