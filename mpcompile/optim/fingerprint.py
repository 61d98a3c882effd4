"""Whether what something was made from is still so: a fingerprint, compared before each step.

A fingerprint is a list of facts. Each fact knows what it found once, finds it again when it is
asked, and has words for the case that it is another one. They are asked in order, so each may rely
on those before it. (`rests_on.py` lists the facts that a compiled step rests on.)

A step asks this of every parameter and every gradient, with cold caches: each attribute of each
tensor costs. So a fact is a few calls over all of them, and not a loop in Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_inside.names import TensorGuards


class Fact:
    """One thing that must not change.

    Args:
        changed: says in a few words that it has.
        find: of what the fingerprint is of, or of what is asked -> what must stay equal. No
            tensors: these have no equality, see `same`.
        of: what the fingerprint is of.
    """

    def __init__(self, changed: str, find: Callable[[Any], Any], of: Any) -> None:
        self._changed, self._find, self._found = changed, find, find(of)

    def holds(self, now: Any) -> bool:
        """Whether it is unchanged."""
        equal: bool = self._find(now) == self._found
        return equal

    def broken_by(self, now: Any) -> str | None:
        """What has changed, or None."""
        return None if self.holds(now) else self._changed


class Fingerprint:
    """The facts that something rests on. It is one itself, of a larger one."""

    def __init__(self, *facts: Fact | Fingerprint) -> None:
        self._facts = facts
        self._checks = [fact.holds for fact in facts]

    def holds(self, now: Any) -> bool:
        """Whether all of them are unchanged."""
        for check in self._checks:  # noqa: SIM110 (a generator costs more than most checks)
            if not check(now):
                return False
        return True

    def broken_by(self, now: Any) -> str | None:
        """What has changed first, in a few words, or None."""
        return next((why for fact in self._facts if (why := fact.broken_by(now))), None)


def same(found: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether as many values are the same objects, or equal ones that are no tensors."""
    return len(found) == len(known) and (
        all(map(operator.is_, found, known)) or all(map(_same, found, known))
    )


def _same(a: Any, b: Any) -> bool:
    tensors = isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)
    return a is b or (not tensors and a == b)


# -- many tensors at once --------------------------------------------------------------------------

_Ask = Callable[[torch.Tensor], Any]

DTYPE_AND_LAYOUT: _Ask = operator.attrgetter("dtype", "layout")
SHAPE: _Ask = operator.attrgetter("shape")
STRIDE: _Ask = torch.Tensor.stride


class Alike:
    """How some tensors are stored.

    torch's own guards are asked first, one call for all tensors. They compare more than is needed
    here (classes, `requires_grad`, the thread's dispatch keys), so a "no" of theirs only means that
    the tensors themselves are asked.

    Args:
        tensors: they, as they are now; they aren't kept.
        asks: what must not change, of those above: torch's guards know these. Where one differs,
            those after it are not asked for.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *asks: _Ask) -> None:
        self._known = [(ask, [*map(ask, tensors)]) for ask in asks]
        self._guards = _guards(tensors)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether as many tensors are stored alike."""
        if len(tensors) == self._guards[0] and self._guards[1](*tensors):
            return True
        if not all([*map(ask, tensors)] == known for ask, known in self._known):
            return False
        self._guards = _guards(tensors)
        return True


def _guards(tensors: Sequence[torch.Tensor]) -> tuple[int, Callable[..., bool]]:
    """(how many, the check of as many): of class, dtype, device, sizes and strides."""
    if not tensors:
        return 0, lambda: True
    guards = TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],  # type: ignore[misc]
        dynamic_dims_strides=[list(t.stride()) for t in tensors],  # type: ignore[misc]
    )
    return len(tensors), guards.check
