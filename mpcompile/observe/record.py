"""What was seen while one graph ran: the numbers of tensors, by the names of the graph's nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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
        return sum(map(cls._of_tensor, floats_of(value)), cls())

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


@dataclass(frozen=True)
class BackwardStep:
    """One node of autograd's graph that ran in a backward pass.

    Attributes:
        node: the node of our graph whose gradient it computed.
        name: autograd's name of it: `"MulBackward0"`.
        received, passed_on: the gradients that came in, and those that it computed.
    """

    node: str
    name: str
    received: Numbers
    passed_on: Numbers


@dataclass
class Record:
    """One run of one graph, forward and backward.

    Attributes:
        values: of the result of each node, by its name.
        gradients: of the gradient of each node's result, as it is in the graph (that is, multiplied
            by the loss scale where the graph scales), summed over backward passes.
        steps: the backward, in the order in which it ran.
        exact: the results of each node, and `exact_gradients` the gradient of each of them (name,
            number of the result), if they are kept for a comparison.
        errors, gradient_errors: by how much values and gradients are off, relative to the norm of
            the exact ones. Gradients are compared without the loss scale.
        shares, gradient_shares: what the low dtype makes of the exact values, and of the exact
            gradients times the loss scale, where the graph stores them in the low dtype.
        lost: the share of a gradient's elements that are zero here and not in the exact one.
        path_of: module path in the plan -> module path in this run, see `moved`.
        zeros: of the exact gradients of activations: how many elements are zero.
        histogram: the others of these by binary exponent, see `EXPONENTS`.
    """

    values: dict[str, Numbers] = field(default_factory=dict)
    gradients: dict[str, Numbers] = field(default_factory=lambda: defaultdict(Numbers))
    steps: list[BackwardStep] = field(default_factory=list)
    exact: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    exact_gradients: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    gradient_errors: dict[str, float] = field(default_factory=dict)
    shares: dict[str, Shares] = field(default_factory=dict)
    gradient_shares: dict[str, Shares] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    path_of: Callable[[str], str] = str
    zeros: int = 0
    histogram: torch.Tensor = field(
        default_factory=lambda: torch.zeros(len(EXPONENTS), dtype=torch.int64)
    )


def moved(compiled: Sequence[str | None], called: Sequence[str | None]) -> Callable[[str], str]:
    """Module path in the plan -> module path in this call.

    Dynamo compiles the forward of a submodule once, if a graph break keeps it out of the model's
    own graph, and runs it for every module of that class. The plan names the first of them; the
    parameters that a call passes tell which one it is.

    Args:
        compiled, called: the names of the graph's inputs in the model, when it was compiled and in
            this call: `"layers.0.fc.weight"`; None for an input that is no parameter of it.
    """
    for before, now in zip(compiled, called, strict=True):
        if before is None or now is None or before == now:
            continue
        old, new = before.split("."), now.split(".")
        while old and new and old[-1] == new[-1]:
            old.pop()
            new.pop()
        if old and new:
            start, to = ".".join(old), ".".join(new)
            inside = f"{start}."
            return lambda path: (
                to + path.removeprefix(start) if f"{path}.".startswith(inside) else path
            )
    return str
