"""Operators of torch's op_db on operands of 64 x 128 and more, between others that fuse with them.

op_db's own samples have some elements a dim. Each is made larger in one of some ways; the first
that the operator takes is the one. New elements are drawn between a sample's neighbouring ones, so
they stay in the operator's domain and seldom are equal; integers are drawn from a sample's own.
"""

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from op_db_support import OPS, UNINITIALISED, Sample, between, samples_of
from torch.utils import _pytree as pytree
from verified_runs import How, Subject, run

LEAST, MOST = 64 * 128, 1 << 20  # elements
SAMPLES = 12
SECONDS = 3.0
"""What eager may take, forward and backward: determinants of large matrices take minutes."""
LEFT_OUT = UNINITIALISED | {"nn.functional.ctc_loss"}  # the latter may read past its lengths

Sizes = Callable[[torch.Size], list[int]]


def names() -> list[str]:
    """The operators that can be called so."""
    return [name for name, op in OPS.items() if op.name not in LEFT_OUT]


def subject_of(name: str) -> Subject:
    """An operator on a large sample; on op_db's own where it takes none.

    Raises:
        LookupError: it takes none of its samples here.
    """
    op = OPS[name]
    samples = samples_of(op, first=SAMPLES)
    for way in _WAYS:
        for sample in samples:
            large = _Large(sample, way)
            if (way is None or large.is_large()) and _is_taken(subject := _subject(name, large)):
                return subject
    raise LookupError(name)


def _subject(name: str, large: "_Large") -> Subject:
    shapes = [tuple(v.shape) for v in pytree.tree_leaves(large.draw(0)) if _is_tensor(v)]
    return Subject(name, fused(OPS[name].op), large.draw, f"{name} of {shapes}")


def fused(call: Callable[..., Any]) -> Callable[..., Any]:
    """An operator between LOW ones, with what is computed of its results along and across rows."""
    inner = between(call)

    def program(x: Any, args: Any, kwargs: Any) -> list[Any]:
        made = _flat(inner([(x, args, kwargs)]))
        more = []
        for value in made:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                more.append((value * 0.75 + 0.125).sin())
                if value.dim() >= 2:
                    more.append(value.transpose(-1, -2).cos() + value.transpose(-1, -2))
        return [*made, *more]

    return program


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [one for part in value for one in _flat(part)]
    return [value]


def _is_taken(subject: Subject) -> bool:
    how = How(torch.bfloat16, "O1")
    start = time.perf_counter()
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        run(subject.program, subject.draw(0), how)
        if time.perf_counter() - start < SECONDS:
            run(subject.program, subject.draw(0), how, wide=True)
            return True
    return False


# -- making a sample larger -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """How sizes become larger.

    Attributes:
        sizes: of an operand.
        all: of every operand; False: of the first one.
        numbers: integers among the arguments that are sizes of the sample become larger alike.
    """

    sizes: Sizes
    all: bool = True
    numbers: bool = False


def _last_two(size: torch.Size) -> list[int]:
    """64 x 128, with as many of them as there were."""
    new = {-1: 128, -2: 64}
    return [new.get(k - len(size), n) if n > 1 else n for k, n in enumerate(size)]


def _alike(size: torch.Size) -> list[int]:
    """Equal sizes stay equal: products and shapes still fit."""
    times = {1: 1024, 2: 16, 3: 5}.get(len(size), 3)
    return [n * times if n > 1 else n for n in size]


def _by_sixteen(size: torch.Size) -> list[int]:
    return [n * 16 if n > 1 else n for n in size]


def _first(size: torch.Size) -> list[int]:
    """More rows."""
    return [n * 128 if k == 0 else n for k, n in enumerate(size)]


_WAYS = (
    _Way(_last_two), _Way(_by_sixteen), _Way(_by_sixteen, numbers=True), _Way(_last_two, all=False),
    _Way(_alike), _Way(_alike, numbers=True), _Way(_first), _Way(_first, all=False), None,
)  # fmt: skip


class _Large:
    """A sample made larger in one way; None: as it is."""

    def __init__(self, sample: Sample, way: _Way | None) -> None:
        self._sample, self._way = sample, way
        tensors = [v for v in pytree.tree_leaves(sample.call) if _is_tensor(v)]
        self._first = tensors[0] if tensors else None
        self._sizes: dict[int, int] = {}
        if way is not None:
            for value in tensors:
                self._sizes.update(zip(value.shape, way.sizes(value.shape), strict=True))

    def is_large(self) -> bool:
        """Whether one of its operands is, and none too large."""
        if self._way is None or self._first is None:
            return False
        all_ = [v for v in pytree.tree_leaves(self._sample.call) if _is_tensor(v)]
        if any(v.layout is not torch.strided for v in all_):
            return False
        counts = [torch.Size(self._new_size(v)).numel() for v in all_]
        return LEAST <= max(counts) <= MOST

    def _new_size(self, value: torch.Tensor) -> list[int]:
        way = self._way
        kept = way is None or not (way.all or value is self._first)
        return list(value.shape) if kept or way is None else way.sizes(value.shape)

    def draw(self, seed: int) -> tuple[Any, ...]:
        """The arguments of a number."""
        generator = torch.Generator().manual_seed(seed)
        number = self._way is not None and self._way.numbers

        def leaf(value: Any) -> Any:
            if _is_tensor(value):
                return _drawn(value, self._new_size(value), generator)
            if number and type(value) is int and value > 1:
                return self._sizes.get(value, value)
            return value

        return tuple(pytree.tree_map(leaf, self._sample.call))


def _drawn(value: torch.Tensor, size: list[int], generator: torch.Generator) -> torch.Tensor:
    old = value.detach()
    if old.layout is not torch.strided or not old.numel() or list(old.shape) == size:
        return old.clone().requires_grad_(value.requires_grad)
    known = old.reshape(-1)
    count = torch.Size(size).numel()
    if old.is_floating_point():
        known = known.sort().values
        at = torch.rand(count, generator=generator) * (len(known) - 1)
        low = at.long().clamp(max=max(0, len(known) - 2))
        new = known[low].lerp(known[(low + 1).clamp(max=len(known) - 1)], at.sub(low).to(old.dtype))
    else:
        new = known[torch.randint(len(known), (count,), generator=generator)]
    return new.reshape(size).requires_grad_(value.requires_grad)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
