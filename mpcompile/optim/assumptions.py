"""What a compiled step was made from, and whether that is unchanged."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..ranks.shards import is_sharded, local
from .alike import DTYPE_AND_LAYOUT, SHAPE, STRIDE, Alike
from .inputs import Member, Setting
from .trace import Trace


class Assumptions:
    """All that must not change for a compiled step to be right, besides its key.

    That is: settings and attributes of the optimizer that the step read; the tensors and values of
    its state (load_state_dict brings new ones); where the parameters are stored, and how large they
    are (`p.data = ...` moves them).

    Args:
        waiting: parameters whose state isn't the optimizer's yet: see `take_in`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Sequence[Member],
        traced: Trace,
        waiting: Collection[torch.Tensor] = (),
    ) -> None:
        self._params = [m.param for m in members if m.updated]
        self._sharded = any(map(is_sharded, self._params))
        held = self._held()
        self._memory = [*map(_MEMORY, held)]
        self._stored = Alike(held, DTYPE_AND_LAYOUT, SHAPE, STRIDE)
        self._reads, self._attributes = traced.reads, traced.attributes
        self._own_values = _Values(traced.attributes)
        self._settings = {
            index: _Values({name: v for (i, name), v in traced.reads.items() if i == index})
            for index in {i for i, _ in traced.reads}
        }
        self._states: list[tuple[torch.Tensor, dict[str, Any], tuple[tuple[str, Any], ...]]] = [
            (param, entries, tuple(entries.items()))
            for param in self._params
            if param not in waiting and (entries := optimizer.state.get(param)) is not None
        ]
        self._snapshot = self._snapshot_of(optimizer.state)

    def take_in(self, optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
        """The optimizer has got the state of these, which waited."""
        for param in params:
            entries = optimizer.state.get(param)
            if entries is not None:
                self._states.append((param, entries, tuple(entries.items())))

    def hold(self, optimizer: Optimizer) -> bool:
        """Whether all of it is unchanged."""
        return (
            self._settings_hold(optimizer.param_groups)
            and self._own_values.hold(vars(optimizer))
            and self._state_holds(optimizer.state)
            and self._lie_there()
        )

    def broken_by(self, optimizer: Optimizer) -> str | None:
        """What has changed, in a few words, or None."""
        if settings := {name for _, name in self.changed_settings(optimizer)}:
            return f"another value of {', '.join(sorted(settings))}"
        now = vars(optimizer)
        if attributes := [k for k, v in self._attributes.items() if not _same(now.get(k), v)]:
            return f"another value of the optimizer's own {', '.join(attributes)}"
        if not self._state_holds(optimizer.state):
            return "other tensors in its state"
        if not self._lie_there():
            return "parameters that lie elsewhere in memory"
        return None

    def changed_settings(self, optimizer: Optimizer) -> frozenset[Setting]:
        """The settings that were constants of the graph and have another value now."""
        groups = optimizer.param_groups
        return frozenset(s for s, v in self._reads.items() if not _same(groups[s[0]].get(s[1]), v))

    # The three below run in every step for every tensor, with cold caches, so they must be fast.

    def _settings_hold(self, groups: Sequence[dict[str, Any]]) -> bool:
        return all(values.hold(groups[i]) for i, values in self._settings.items())

    def _lie_there(self) -> bool:
        held = self._held()
        return [*map(_MEMORY, held)] == self._memory and self._stored.holds(held)

    def _held(self) -> list[torch.Tensor]:
        return [*map(local, self._params)] if self._sharded else self._params

    def _state_holds(self, state: dict[Any, dict[str, Any]]) -> bool:
        if self._snapshot.holds(state):
            return True  # as mostly
        for param, entries, items in self._states:
            if state.get(param) is not entries:
                return False
            for key, value in items:
                now = entries.get(key)
                if now is not value and not _same(now, value):
                    return False
        self._snapshot = self._snapshot_of(state)
        return True

    def _snapshot_of(self, state: dict[Any, dict[str, Any]]) -> _Snapshot:
        return _Snapshot(state, [entries for _, entries, _ in self._states])


class _Values:
    """Values by name, compared with those that an object or a param group has now."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._names, self._values = [*values], [*values.values()]

    def hold(self, now: Mapping[str, Any]) -> bool:
        found = [*map(now.get, self._names)]
        return all(map(operator.is_, found, self._values)) or all(map(_same, found, self._values))


class _Snapshot:
    """The objects that a state consists of: where they are the same, nothing has changed.

    (A look-up by a parameter hashes it, in Python; this asks in few calls over all of them.)

    Args:
        state: all of it.
        own: the entries of the parameters that matter.
    """

    def __init__(self, state: dict[Any, dict[str, Any]], own: Sequence[dict[str, Any]]) -> None:
        self._params, self._entries, self._own = [*state], [*state.values()], own
        self._names = [*itertools.chain.from_iterable(own)]
        self._values = [*self._values_now()]

    def holds(self, state: dict[Any, dict[str, Any]]) -> bool:
        return (
            len(state) == len(self._params)
            and all(map(operator.is_, state, self._params))
            and all(map(operator.is_, state.values(), self._entries))
            and [*itertools.chain.from_iterable(self._own)] == self._names
            and all(map(operator.is_, self._values_now(), self._values))
        )

    def _values_now(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(_VALUES, self._own))


_MEMORY = torch.Tensor.data_ptr
_VALUES: Any = dict.values


def _same(a: Any, b: Any) -> bool:
    tensors = isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)
    return a is b or (not tensors and a == b)
