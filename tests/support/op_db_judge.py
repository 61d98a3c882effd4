"""How close is close enough: one sample's numbers against eager FP32 and against FP64.

Compared are the results, the gradients of the operands, and the operands themselves afterwards
(hidden writes), with

* the same program in eager FP32: dtypes, shapes, which results need a gradient, which results share
  memory with an operand, integers and booleans exactly; and first of all the bits;
* the same program in FP64, within a tolerance, where the bits differ.

The tolerance, entry by entry, in a graph with LOW nodes. No algorithm in FP16 does better than its
data allow, nor than its intermediate values do. What rounding the data does is found in FP64; what
rounding the intermediate values does is read off eager FP32, whose roundings are 2**13 times finer.
With u = 2**-11 the unit roundoff of FP16 and t = 2**-25 half of its smallest subnormal,

    noise(y) = max(2**13 |y32(x) - y64(x)|,
                   |y64(x + s(u|x| + t)) - y64(x)| over 8 draws of s, uniform in [-2, 2])
    error(y) <= LOW_FACTOR * (noise(y) + u |y64(x)| + u**2)

where x is all FP32 operands and, for gradients, the incoming gradients too. Those are of order one,
so u**2 is what two roundings make of them. Products that cancel, and derivatives near a pole, so
get the room that their conditioning asks for and no more. An entry whose noise happens to be small
gets the tensor's upper quartile. A gradient that is zero as a whole where FP64's isn't is wrong
whatever the entries allow.

In a graph without LOW nodes eager FP32's own error is the noise, FULL_FACTOR the factor, and
u = 2**-24.

FP64 draws other random numbers than FP32: for a random operator eager FP32, under the same seed,
stands in for FP64.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from mpcompile.passes.graph import own_memory

DRAWS = 8
LOW_FACTOR, FULL_FACTOR = 8.0, 4.0
U16, TINY16, MAX16 = 2.0**-11, 2.0**-25, 65504.0
U32 = 2.0**-24


class Status(enum.Enum):
    EXACT = "bit for bit eager FP32"
    FP32 = "within FP32 tolerance"
    FP16 = "within FP16 tolerance"
    BREAK = "Dynamo breaks the graph; what the user then gets is right"
    SKIP = "eager FP32 refuses the sample"
    WRONG = "wrong"
    CRASH = "crash"

    @property
    def passes(self) -> bool:
        return self in (Status.EXACT, Status.FP32, Status.FP16)


@dataclass(frozen=True)
class Verdict:
    """What came of one sample.

    Attributes:
        status: the worst of its tensors'.
        detail: which tensor, or what went wrong.
        index: the sample's number in op_db.
        ratio: error over tolerance, the largest.
    """

    status: Status
    detail: str = ""
    index: int = -1
    ratio: float = 0.0


@dataclass
class Result:
    """What one run of one sample gave; entries correspond between runs."""

    outputs: list[Any]
    gradients: list[torch.Tensor | None]
    operands: list[torch.Tensor]
    tracked: list[bool] = field(default_factory=list)
    shared: set[tuple[int, int]] = field(default_factory=set)


Run = Callable[..., list[Result]]


class Reference:
    """A batch in eager FP32 and in FP64; how much rounding its data moves it, once asked.

    Args:
        run: `run(wide=False, draw=None)` gives a result per sample, in FP64 if wide, with all data
            moved by a rounding if a draw is named.
    """

    def __init__(self, run: Run) -> None:
        before = _reseed()
        self._run = run
        self.narrow = run()
        self.random = not torch.equal(before, torch.get_rng_state())

    @cached_property
    def wide(self) -> list[Result]:
        return self._run(wide=not self.random)

    @cached_property
    def moved(self) -> list[list[Result]]:
        return [self._run(wide=not self.random, draw=draw) for draw in range(1, DRAWS + 1)]


def _reseed() -> torch.Tensor:
    torch.manual_seed(SEED)
    return torch.get_rng_state()


SEED = 1


class Mismatch(Exception):
    """What differs, in words."""


def compare(ours: list[Result], reference: Reference, *, low: bool) -> list[Verdict]:
    """The verdict on each sample of a batch that ran; `low`: the graph has LOW nodes."""
    verdicts = []
    for i, mine in enumerate(ours):
        try:
            verdicts.append(_compare(i, mine, reference, low))
        except Mismatch as error:
            verdicts.append(Verdict(Status.WRONG, str(error)))
    return verdicts


def _compare(i: int, mine: Result, reference: Reference, low: bool) -> Verdict:
    theirs = reference.narrow[i]
    if len(mine.outputs) != len(theirs.outputs):
        raise Mismatch(f"{len(mine.outputs)} results, not {len(theirs.outputs)}")
    if mine.tracked != theirs.tracked:
        raise Mismatch(f"needs a gradient: {mine.tracked}, not {theirs.tracked}")
    # A result whose elements share memory with each other is a copy (`copy_overlaps`): as a view of
    # an input, too, its gradient would be wrong.
    copied = any(own_memory._overlaps(x) for x in theirs.outputs if isinstance(x, torch.Tensor))
    if not (low or copied) and mine.shared != theirs.shared:
        raise Mismatch(f"shares memory: {mine.shared}, not {theirs.shared}")
    found = [Verdict(Status.EXACT)]
    for part in ("outputs", "gradients", "operands"):
        for k, (a, b) in enumerate(zip(getattr(mine, part), getattr(theirs, part), strict=True)):
            try:
                if _differ(a, b):
                    others = _others(reference, i, part, k, low)
                    if part == "gradients":
                        _check_alive(a, *others)
                    found.append(_judge(a, b, others, reference, low))
            except Mismatch as error:
                raise Mismatch(f"{part}[{k}]: {error}") from None
    return max(found, key=lambda v: (list(Status).index(v.status), v.ratio))


def _differ(mine: Any, theirs: Any) -> bool:
    """Whether the numbers have to be compared; what must agree exactly is checked here."""
    if not isinstance(theirs, torch.Tensor) or mine is None:
        same = mine == theirs or (mine != mine and theirs != theirs)  # None, a number, nan
        if not isinstance(theirs, torch.Tensor) and same:
            return False
        raise Mismatch(f"{mine} instead of {theirs}")
    for what in ("dtype", "shape"):
        if getattr(mine, what) != getattr(theirs, what):
            raise Mismatch(f"{what} {getattr(mine, what)} instead of {getattr(theirs, what)}")
    if _same_bits(mine, theirs):
        return False
    if not (theirs.is_floating_point() or theirs.is_complex()):
        raise Mismatch(f"{int((mine != theirs).sum())} of {mine.numel()} entries differ")
    return True


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is torch.complex32:  # has no comparison
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def _others(
    reference: Reference, i: int, part: str, k: int, low: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The tensor in FP64, and in the runs whose data were moved."""
    moved = reference.moved if low else []
    return getattr(reference.wide[i], part)[k], [getattr(r[i], part)[k] for r in moved]


def _judge(
    mine: torch.Tensor,
    theirs: torch.Tensor,
    others: tuple[torch.Tensor, list[torch.Tensor]],
    reference: Reference,
    low: bool,
) -> Verdict:
    if reference.random and not low:
        raise Mismatch("random numbers differ from eager's under the same seed")
    exact, moved = others
    finite = _comparable(mine, exact, theirs, low)
    error = (mine.to(exact.dtype) - exact).abs()[finite]
    size = exact.abs()[finite]
    narrow = (theirs.to(exact.dtype) - exact).abs()[finite]
    tiers = [(Status.FP32, FULL_FACTOR, narrow, U32)]
    if low:
        shifts = [(m - exact).abs()[finite].nan_to_num() for m in moved]
        noise = torch.stack([narrow * (U16 / U32), *shifts]).amax(0)
        tiers.append((Status.FP16, LOW_FACTOR, noise, U16))
    for status, factor, noise, unit in tiers:
        typical = _upper_quartile(noise)
        ratios = error / (factor * (noise.clamp(min=typical) + unit * size + unit**2))
        if not (ratios > 1).any():
            return Verdict(status, ratio=float(ratios.max()) if ratios.numel() else 0.0)
    k = int(ratios.argmax())
    raise Mismatch(
        f"{ratios[k]:.3g} times the {status.name} tolerance: an error of {error[k]:.3g} in "
        f"{size[k]:.3g}, where noise is {noise[k]:.3g}, {typical:.3g} elsewhere"
    )


def _check_alive(gradient: torch.Tensor, exact: torch.Tensor, moved: list[torch.Tensor]) -> None:
    """It isn't zero as a whole where FP64's isn't, even where single entries are allowed to be."""
    noise = max([0.0, *(float((m - exact).nan_to_num().norm()) for m in moved)])
    norm = float(exact.nan_to_num().norm())
    if not bool(gradient.any()) and norm > max(2 * noise, TINY16 * exact.numel() ** 0.5):
        raise Mismatch(f"exactly zero; its norm is {norm:.3g} (noise {noise:.3g})")


def _upper_quartile(values: torch.Tensor) -> float:
    n = values.numel()  # torch.quantile refuses large tensors
    return float(values.flatten().kthvalue((3 * n + 3) // 4).values) if n else 0.0


def _comparable(
    mine: torch.Tensor, exact: torch.Tensor, narrow: torch.Tensor, low: bool
) -> torch.Tensor:
    """Which entries to compare: the finite ones. The others must be as eager FP32 has them."""
    finite = exact.isfinite() & narrow.isfinite()
    if low:  # beyond FP16's range, infinity is the right answer
        finite &= exact.abs() <= MAX16
    lost = finite & ~mine.isfinite()
    if lost.any():
        worst = float(exact[lost].abs().min())
        raise Mismatch(f"{int(lost.sum())} entries not finite, e.g. {worst:.4g} in FP64")
    if not low and (mine.isfinite() & ~narrow.isfinite()).any():
        raise Mismatch("finite where eager FP32 is not")
    return finite
