"""What a compiled step was made from, and whether that is unchanged."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..ranks.shards import is_sharded, local
from .inputs import Member, Setting
from .trace import Trace


class Assumptions:
    """All that must not change for a compiled step to be right, besides its key.

    That is: settings and attributes of the optimizer that the step read; the tensors and values of
    its state (load_state_dict brings new ones); where the parameters are stored, and how large they
    are (`p.data = ...` moves them).
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member], traced: Trace) -> None:
        self._params = [m.param for m in members if m.updated]
        self._sharded = any(map(is_sharded, self._params))
        self._memory = self._memory_now()
        self._reads, self._attributes = traced.reads, traced.attributes
        self._states: list[tuple[torch.Tensor, dict[str, Any], tuple[tuple[str, Any], ...]]] = [
            (param, entries, tuple(entries.items()))
            for param in self._params
            if (entries := optimizer.state.get(param)) is not None
        ]

    def hold(self, optimizer: Optimizer) -> bool:
        """Whether all of it is unchanged."""
        return (
            self._settings_hold(optimizer.param_groups)
            and not self._changed_attributes(optimizer)
            and self._state_holds(optimizer.state)
            and self._lie_there()
        )

    def broken_by(self, optimizer: Optimizer) -> str | None:
        """What has changed, in a few words, or None."""
        if settings := {name for _, name in self.changed_settings(optimizer)}:
            return f"another value of {', '.join(sorted(settings))}"
        if attributes := self._changed_attributes(optimizer):
            return f"another value of the optimizer's own {', '.join(attributes)}"
        if not self._state_holds(optimizer.state):
            return "other tensors in its state"
        if not self._lie_there():
            return "parameters that lie elsewhere in memory"
        return None

    def _changed_attributes(self, optimizer: Optimizer) -> list[str]:
        attributes = vars(optimizer)
        return [k for k, v in self._attributes.items() if not _same(attributes.get(k), v)]

    def changed_settings(self, optimizer: Optimizer) -> frozenset[Setting]:
        """The settings that were constants of the graph and have another value now."""
        groups = optimizer.param_groups
        return frozenset(s for s, v in self._reads.items() if not _same(groups[s[0]].get(s[1]), v))

    # The three below run in every step for every tensor, with cold caches, so they must be fast.

    def _settings_hold(self, groups: Sequence[dict[str, Any]]) -> bool:
        for (group, name), value in self._reads.items():
            now = groups[group].get(name)
            if now is not value and not _same(now, value):
                return False
        return True

    def _lie_there(self) -> bool:
        return self._memory_now() == self._memory

    def _memory_now(self) -> list[list[Any]]:
        held = [*map(local, self._params)] if self._sharded else self._params
        return [[*map(look, held)] for look in _LOOKS]

    def _state_holds(self, state: dict[Any, dict[str, Any]]) -> bool:
        for param, entries, items in self._states:
            if state.get(param) is not entries:
                return False
            for key, value in items:
                now = entries.get(key)
                if now is not value and not _same(now, value):
                    return False
        return True


_LOOKS = (
    torch.Tensor.data_ptr,
    operator.attrgetter("dtype"),
    operator.attrgetter("shape"),
    torch.Tensor.stride,
)


def _same(a: Any, b: Any) -> bool:
    tensors = isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)
    return a is b or (not tensors and a == b)
