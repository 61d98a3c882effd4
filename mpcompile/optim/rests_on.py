"""What a compiled step rests on: whether it is still so is compared before each step.

of_key     which step it is: the parameters, which of them have a gradient, how that is stored
OfStep     what its graph was made from: settings and attributes of the optimizer that it read,
           the tensors and values of the state (load_state_dict brings new ones), and where the
           parameters are stored (`p.data = ...` moves them)

Both are fingerprints: lists of facts. Each fact knows what it found once, finds it again when it is
asked, and has words for the case that it is another one. They are asked in order, so each may rely
on those before it.

A step asks this of every parameter and every gradient, with cold caches: each attribute of each
tensor costs. So a fact is a few calls over all of them, and not a loop in Python.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..ranks.shards import is_sharded, local, place_gradient
from ..scaling import parameters
from ..scaling.loss_scale import LossScale
from ..scaling.parameters import parameters_of
from ..torch_inside.names import TensorGuards
from .members import Member
from .shadow import own_values
from .trace import Trace


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


# -- of an optimizer's step ------------------------------------------------------------------------

_GRAD = operator.attrgetter("grad")
_RULE = operator.attrgetter("rule")
_SIZE = torch.Tensor.numel
_MEMORY = torch.Tensor.data_ptr
_VALUES: Any = dict.values


def of_key(optimizer: Optimizer, scales: Sequence[LossScale], *, sharded: bool) -> Fingerprint:
    """Which step of this optimizer it is, over gradients that depend on these loss scales."""
    return Fingerprint(
        Fact(
            "other owners, copies or loss scales of parameters",
            lambda _: [parameters.changes(), *map(_RULE, scales)],
            optimizer,
        ),
        Gradients(optimizer, sharded=sharded),
    )


class Gradients(Fact):
    """The parameters that have a gradient, and how it is stored.

    Args:
        sharded: whether some parameters may be DTensors. Their gradients are then placed like them.
    """

    def __init__(self, optimizer: Optimizer, *, sharded: bool = False) -> None:
        self._changed, self._sharded = "other gradients", sharded
        self._params = parameters_of(optimizer)
        self._lengths = [len(group["params"]) for group in optimizer.param_groups]
        self._sizes = [*map(_SIZE, self._params)]
        grads = self._now(self._params)
        self._missing = [grad is None for grad in grads]
        self._taking_part = [
            not none and size > 0 for none, size in zip(self._missing, self._sizes, strict=True)
        ]
        found = [*itertools.compress(grads, self._taking_part)]
        # A sparse gradient, whose layout is another, has no strides.
        self._stored = Alike(found, DTYPE_AND_LAYOUT, STRIDE)

    def _now(self, params: Sequence[torch.Tensor]) -> list[Any]:
        if not self._sharded:
            return [*map(_GRAD, params)]
        for param in params:
            place_gradient(param)
        return [None if p.grad is None else local(p.grad) for p in params]

    def holds(self, now: Optimizer) -> bool:
        lists = [group["params"] for group in now.param_groups]
        params = [*itertools.chain.from_iterable(lists)]
        grads = self._now(params)
        return (
            [*map(len, lists)] == self._lengths
            and all(map(operator.is_, params, self._params))
            and [*map(operator.is_, grads, itertools.repeat(None))] == self._missing
            and [*map(_SIZE, params)] == self._sizes
            and self._stored.holds([*itertools.compress(grads, self._taking_part)])
        )


class OfStep(Fingerprint):
    """What the graph of a step was made from.

    Args:
        traces: its own, before any pass; none: a kernel of torch's reads the settings again.
        more: about the settings that the graph takes as inputs; others are its `constants`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Sequence[Member],
        traces: Sequence[Trace] = (),
        *more: Fact,
    ) -> None:
        reads = {key: value for one in traces for key, value in one.reads.items()}
        own = {(0, k): v for one in traces for k, v in one.attributes.items()}
        self.constants = Values("", lambda o: o.param_groups, reads)
        marked = [m.param for m in members if own_values(m.param)]  # by users
        super().__init__(
            self.constants,
            Values("the optimizer's own ", lambda o: [vars(o)], own),
            State(optimizer, members),
            Memory(members),
            Fact("an attribute of a parameter", lambda _: [*map(own_values, marked)], optimizer),
            *more,
        )


class Values(Fact):
    """Values by name, in tables that an optimizer has.

    Args:
        whose: what names of these are called by, in front of them.
        tables: finds the tables.
        values: (index of the table, name) -> value.
    """

    def __init__(
        self,
        whose: str,
        tables: Callable[[Optimizer], Sequence[Mapping[str, Any]]],
        values: Mapping[tuple[int, str], Any],
    ) -> None:
        self._whose, self._tables = whose, tables
        self._known: dict[int, dict[str, Any]] = {}
        for (index, name), value in values.items():
            self._known.setdefault(index, {})[name] = value

    def holds(self, now: Optimizer) -> bool:
        tables = self._tables(now)
        for i, known in self._known.items():
            if i >= len(tables) or not same([*map(tables[i].get, known)], [*known.values()]):
                return False
        return True

    def broken_by(self, now: Optimizer) -> str | None:
        names = sorted({name for _, name in self.changed(now)})
        return f"another value of {self._whose}{', '.join(names)}" if names else None

    def changed(self, now: Optimizer) -> frozenset[tuple[int, str]]:
        """Those that are another one now, in tables that are still there."""
        tables = self._tables(now)
        return frozenset(
            (i, name)
            for i, known in self._known.items()
            for name, v in known.items()
            if i < len(tables) and not same([tables[i].get(name)], [v])
        )


class Memory(Fact):
    """Where the parameters that a step updates lie, and how they are stored."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._changed = "parameters that lie elsewhere in memory"
        self._params = [m.param for m in members if m.updated]
        self._sharded = any(map(is_sharded, self._params))
        held = self._held()
        self._memory = [*map(_MEMORY, held)]
        self._stored = Alike(held, DTYPE_AND_LAYOUT, SHAPE, STRIDE)

    def _held(self) -> list[torch.Tensor]:
        return [*map(local, self._params)] if self._sharded else self._params

    def holds(self, now: Optimizer) -> bool:
        held = self._held()
        return [*map(_MEMORY, held)] == self._memory and self._stored.holds(held)


class State(Fact):
    """The state of the parameters that a step updates: its objects, or equal numbers in it."""

    def __init__(self, optimizer: Optimizer, members: Sequence[Member]) -> None:
        self._changed = "other tensors in its state"
        found = [(m.param, optimizer.state.get(m.param)) for m in members if m.updated]
        self._known = [(p, entries, dict(entries)) for p, entries in found if entries is not None]
        self._look(optimizer.state)

    def holds(self, now: Optimizer) -> bool:
        state = now.state
        if self._is_untouched(state):
            return True  # as mostly
        for param, entries, items in self._known:
            now_there = [*map(entries.get, items)]
            if state.get(param) is not entries or not same(now_there, [*items.values()]):
                return False
        self._look(state)
        return True

    # A look-up by a parameter hashes it, in Python. So the objects that the state consists of are
    # compared first, in few calls over all of them: where they are the same, nothing has changed.

    def _look(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        self._own = [entries for _, entries, _ in self._known]
        self._params, self._entries = [*state], [*state.values()]
        self._names = [*itertools.chain.from_iterable(self._own)]
        self._values = [*self._values_now()]

    def _is_untouched(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> bool:
        return (
            len(state) == len(self._params)
            and all(map(operator.is_, state, self._params))
            and all(map(operator.is_, state.values(), self._entries))
            and [*itertools.chain.from_iterable(self._own)] == self._names
            and all(map(operator.is_, self._values_now(), self._values))
        )

    def _values_now(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(_VALUES, self._own))
