"""The object whose step is traced: it has the optimizer's class, but other tensors.

It has the same attributes and settings as the optimizer; its parameters, gradients and state are
the graph's inputs. Steps that can't be a graph are refused: those that change state or settings
kept as Python values, or tensors that belong to no parameter.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import CannotRewrite
from ..ir.step_config import Slot
from ..torch_inside.optimizers import unhooked, without_wrappers
from .masters import entries_of
from .members import Member, Setting, is_list

# Settings that are inputs of the graph, or that are chosen here.
_NOT_READ = ("params", "foreach", "fused", "capturable")
# The capturable single-tensor step of these divides by the learning rate: at 0, where a warmup
# starts, an element whose moments are 0 becomes 0 / 0. Their other step can be traced as well.
_BETTER_NOT_CAPTURABLE = (torch.optim.Adam, torch.optim.AdamW)
# Where a torch.optim optimizer keeps its hooks.
HOOKS = tuple(
    f"_optimizer_{method}_{when}_hooks"
    for method in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)


class StateAppeared(CannotRewrite):
    """The step made new state: it can be traced once that state exists."""


class Shadow:
    """Runs the optimizer's step on other tensors, and checks what else the step changed.

    Args:
        optimizer: whose step it is; it is not changed.
        foreach: ask for the multi-tensor implementation, if the class has one.

    Attributes:
        reads: the settings that the step has read, and their values.
        attributes: the optimizer's own attributes that are plain values.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member], *, foreach: bool) -> None:
        self.optimizer = optimizer
        self.members = {i: member for i, member in enumerate(members) if member.updated}
        self.foreach = foreach
        self.reads: dict[Setting, Any] = {}
        own = _own_attributes(optimizer)
        self.attributes = _plain_values(own)
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, value in own.items():
            if _names_one(value, ids):
                raise CannotRewrite(f"it keeps parameters of its own in {name!r}, to tell them by")

    def run(self, tensors: dict[Slot, Any]) -> None:
        """Do the step on these inputs of the graph; its changes are written into them.

        Raises:
            StateAppeared: the step makes state that isn't there yet.
            CannotRewrite: it changes a value that is no tensor, or state of no parameter.
        """
        optimizer: Any = object.__new__(unhooked(type(self.optimizer)))
        optimizer.__dict__.update(self.optimizer.__dict__)
        # Copies of the plain values: the step's changes to them don't reach the optimizer.
        optimizer.__dict__.update(_plain_values(self.attributes))
        state: dict[Any, dict[str, Any]] = defaultdict(dict)
        given: dict[Any, dict[str, Any]] = {}
        params: dict[int, list[torch.Tensor]] = defaultdict(list)
        for i, member in self.members.items():
            param = tensors[Slot("param", i)]
            param.grad = tensors[Slot("grad", i)]
            vars(param).update(own_values(member.param))
            params[member.group].append(param)
            if entries := entries_of(self.optimizer, member.param):
                state[param] = {k: self._working(tensors, i, k, v) for k, v in entries.items()}
            given[param] = dict(state.get(param, {}))
        optimizer.state = state
        optimizer.param_groups = [
            _Group(self.reads, index, self._settings(group, index, tensors, params[index]))
            for index, group in enumerate(self.optimizer.param_groups)
            if index in params
        ]
        settings = [_plain_values(dict(group)) for group in optimizer.param_groups]
        with _nothing_else(self.optimizer):
            without_wrappers(type(self.optimizer).step)(optimizer)
        _refuse_changes("attribute", self.attributes, _plain_values(_own_attributes(optimizer)))
        for before, group in zip(settings, optimizer.param_groups, strict=True):
            _refuse_changes("setting of its param group", before, _plain_values(dict(group)))
        if other := [key for key in state if not any(key is p for p in given)]:
            raise CannotRewrite(
                f"it keeps state that belongs to no parameter of this step ({other[0]!r})"
            )
        for i in self.members:
            param = tensors[Slot("param", i)]
            _write_back(tensors, i, given[param], state.get(param, {}))

    def _settings(
        self, group: dict[str, Any], index: int, inputs: dict[Slot, Any], params: list[torch.Tensor]
    ) -> dict[str, Any]:
        def taken(key: str, value: Any) -> Any:  # the input of the graph, if there is one
            if is_list(value):
                return type(value)(taken(f"{key}.{i}", v) for i, v in enumerate(value))
            slot = Slot("lr", index) if key == "lr" else Slot("setting", index, key)
            return inputs.get(slot, value)

        adam = isinstance(self.optimizer, _BETTER_NOT_CAPTURABLE)
        chosen = {
            "params": params,
            "foreach": self.foreach,
            "fused": False,
            "capturable": self.foreach or not adam,
        }
        return {k: chosen[k] if k in chosen else taken(k, _fresh(v)) for k, v in group.items()}

    def _working(self, tensors: dict[Slot, torch.Tensor], index: int, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensor = tensors[Slot("state", index, str(key))]
        # The moments of a 0-d parameter are 0-d too; its step counter is called "step".
        number = tensor.ndim == 0 and (tensors[Slot("param", index)].ndim > 0 or key == "step")
        counts = number and tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.double() if counts else tensor


def _write_back(
    tensors: dict[Slot, Any], index: int, given: dict[str, Any], after: dict[str, Any]
) -> None:
    if new := [k for k, v in after.items() if v is not None and given.get(k) is None]:
        raise StateAppeared(f"its first step makes the state {', '.join(map(repr, new))}")
    _refuse_changes("entry of its state", _plain_values(given), _plain_values(after))
    for key, value in after.items():
        if isinstance(value, torch.Tensor):
            stored = tensors[Slot("state", index, str(key))]
            if value.shape != stored.shape:
                raise CannotRewrite(f"it changes the shape of its state {key!r}")
            if value is not stored:
                stored.copy_(value)


class _Group(dict[str, Any]):
    """A param group that notes which settings are read: they are constants of the graph."""

    def __init__(self, reads: dict[Setting, Any], index: int, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._reads, self._index = reads, index

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key not in _NOT_READ and not (key == "lr" and isinstance(value, torch.Tensor)):
            self._reads[self._index, key] = _fresh(value)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (reads through __getitem__)


def own_values(param: torch.Tensor) -> dict[str, Any]:
    """What a user has set on a parameter, and a step may choose by: plain values."""
    return _plain_values({k: v for k, v in vars(param).items() if not k.startswith(_OURS)})


_OURS = ("_dynamo", "_mp_")  # what torch's compiler and this one note on a parameter
_PLAIN = (bool, int, float, str, type(None))


def _plain_values(table: dict[str, Any]) -> dict[str, Any]:
    """Copies of the entries that are plain Python values, or tuples, lists and dicts of them."""
    return {k: _fresh(v) for k, v in table.items() if _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    return isinstance(value, _PLAIN)


def _fresh(value: Any) -> Any:
    """A copy: lists and dicts are new."""
    if isinstance(value, list):
        return [_fresh(v) for v in value]
    if isinstance(value, dict):
        return {k: _fresh(v) for k, v in value.items()}
    return value


def _names_one(value: Any, ids: Collection[int]) -> bool:
    """Whether a value is a parameter with one of these ids, or such an id, or holds one: the step
    runs on other tensors, which it would not know by it.
    """
    if isinstance(value, torch.Tensor):
        return id(value) in ids
    if isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        parts = value.items() if isinstance(value, Mapping) else value
        return any(_names_one(part, ids) for part in parts)
    return type(value) is int and value in ids


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What a step may read from the optimizer itself: not the hooks, which run around it."""
    return {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", *HOOKS)}


@contextlib.contextmanager
def _nothing_else(optimizer: Optimizer) -> Iterator[None]:
    """Refuse a step that draws from Python's `random`, or changes a value of an object that the
    optimizer holds: every step would be as the traced one. What it changed is put back.
    """
    held = {
        name: vars(value)
        for name, value in _own_attributes(optimizer).items()
        if isinstance(getattr(value, "__dict__", None), dict)
    }
    before = {name: _plain_values(table) for name, table in held.items()}
    drawn = random.getstate()
    try:
        yield
    finally:
        draws = random.getstate() != drawn
        random.setstate(drawn)
        after = {name: _plain_values(table) for name, table in held.items()}
        for name, table in held.items():
            if after[name] != before[name]:
                for key in after[name].keys() - before[name].keys():
                    del table[key]
                table.update(before[name])
    if draws:
        raise CannotRewrite("it draws from `random`, in every step again")
    for name, values in before.items():
        _refuse_changes(f"attribute {name!r} with", values, after[name])


def _refuse_changes(what: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    if new := after.keys() - before.keys():
        raise StateAppeared(f"its first step makes the {what} {min(new)!r}")
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            raise CannotRewrite(
                f"it keeps the {what} {key!r} as a Python value and changes it in every step; "
                "keep it as a tensor in `state`"
            )
