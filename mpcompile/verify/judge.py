"""Is a compiled value right? By rounding, not by a constant.

Right is what is off from the exact value by at most three times what an uncompiled value is: the
largest error of an element, and of a row and of a column relative to what stands in it (a mean over
all hides a wrong tile). A unit in the last place of the value's dtype is always allowed. Where
only the compiled value isn't finite, it is wrong at once; where FP16 overflows uncompiled, too, it
may do so in three times as many places. Decisions (masks, indices) may be others in as many places,
three times over, as the uncompiled ones are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .reference import Pair

TIMES = 3.0
_FEW = 64
"""Elements up to which a value's own error is luck: a sum of many that nearly cancelled."""
_FP32 = 32
"""Units in the last place, of what is usual in its row, that an FP32 value may be off in any case:
sums are added up in another order. What is further off is compared with FP64.
"""
_ROWS = 16
"""Elements from which on the mean error of a row says something."""
_LARGE, _APART = 1 << 20, 13
"""Elements from which on some rows are compared, and how far apart these are at most."""


@dataclass(frozen=True)
class Errors:
    """How far two values are from the exact one; what is allowed without asking is taken off.

    Attributes:
        compiled: of the compiled value: the largest error of an element, row and column; nothing
            where the uncompiled one is nowhere finite.
        uncompiled: of the uncompiled one.
        holes: in how many places the compiled one isn't finite where the exact one is in its dtype;
            in how many the uncompiled one isn't where the exact one is in the wider dtype (what a
            mask makes infinite is no overflow).
    """

    compiled: tuple[float, ...]
    uncompiled: tuple[float, ...]
    holes: tuple[int, int] = (0, 0)

    def __or__(self, other: Errors) -> Errors:
        """With another uncompiled value taken into account: the larger error is what may be. One
        that is nowhere finite tells nothing.
        """
        most = tuple(map(max, self.uncompiled, other.uncompiled or self.uncompiled))
        holes = self.holes[0], max(self.holes[1], other.holes[1])
        return Errors(self.compiled, most, holes)

    @property
    def finite(self) -> bool:
        """Whether the compiled value is finite where it has to be. Where FP16 overflows anyway, the
        order of a sum decides in which places it does; oneDNN's weight gradients of a convolution
        sum in FP16 over the images, or not, as the layout is.
        """
        return self.holes[0] <= TIMES * self.holes[1]

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
    low, wide, eps, _ = pair
    if compiled.numel() == 0:
        return Errors((), ())
    compiled, low, wide = (v if v.dim() else v.reshape(1) for v in (compiled, low, wide))
    if compiled.is_complex():
        compiled, low, wide = (torch.view_as_real(v.resolve_conj()) for v in (compiled, low, wide))
    if not compiled.dtype.is_floating_point:
        wide = wide.to(low.dtype)
        mine, theirs = ((value != wide).sum().item() for value in (compiled, low))
        # Where nothing is rounded nothing may differ; else some of what is nearly equal may.
        free = math.ceil(4 * eps * compiled.numel()) if eps > 1e-5 else 0
        return Errors((float(max(0, mine - free)),), (float(theirs),))
    return _floating_errors(compiled, low, wide, eps)


def _floating_errors(compiled: Tensor, low: Tensor, wide: Tensor, eps: float) -> Errors:
    """The errors of elements, rows and columns of two floating values.

    Of a large value some rows are compared: of each 16, and so of each tile that a kernel moves, at
    least one.
    """
    width = compiled.shape[-1] if compiled.dim() > 1 else compiled.numel()
    each = min(_APART, max(1, compiled.numel() // _LARGE))
    luck = 2 * eps if compiled.numel() <= _FEW else 0.0
    compiled, low, wide = (_rows(v.reshape(-1, width), each) for v in (compiled, low, wide))
    dtype = compiled.dtype
    exact = torch.promote_types(wide.dtype, torch.float32)
    c, u, w = (value.to(exact) for value in (compiled, low, wide))
    scale = w.abs()
    holes = 0, 0
    if not bool((c + u + w).isfinite().all()):
        rounded = w.to(dtype)
        # What isn't finite is judged by that alone; elsewhere the others are.
        meant = rounded.isfinite()
        holes = _count(meant & ~compiled.isfinite()), _count(w.isfinite() & ~low.isfinite())
        seen = meant & low.isfinite()  # elsewhere nothing tells what rounding does
        if holes[1] and not bool(seen.any()):
            return Errors((), (), holes)
        c = torch.where(compiled.isfinite(), c, w)
        c, u, w = (torch.where(seen, v, 0.0) for v in (c, u, w))
        scale = w.abs()
    size = scale.square().mean(1, keepdim=True)
    info = torch.finfo(dtype)
    free = scale * (info.eps + luck)
    if dtype is torch.float32:
        free += _FP32 * info.eps * size.sqrt()
    off_c = c.sub(w).abs_().sub_(free).clamp_min_(0)
    off_u = u.sub(w).abs_()
    most = [off.max().item() for off in (off_c, off_u)]
    squares = off_c.square_(), off_u.square_(), scale.square_()
    for dim in (0, 1):
        if c.shape[dim] >= _ROWS:
            mine, theirs, size = (square.mean(dim) for square in squares)
            most += [_ratio(mine, size).max().item(), _ratio(theirs, size).max().item()]
    return Errors(tuple(most[::2]), tuple(most[1::2]), holes)


def _count(mask: Tensor) -> int:
    return int(mask.sum().item())


def _rows(value: Tensor, each: int) -> Tensor:
    """Each n-th row, and the last one."""
    return value if each == 1 else torch.cat([value[::each], value[-1:]])


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """The errors relative to what stands there; both squared."""
    return torch.where(size > 0, error / size, 0.0).sqrt()


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
