"""An optimizer's state from a checkpoint: it is loaded only if it is of parameters like these."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..errors import MPCompileError
from ..ranks.zero import is_zero
from .first_state import state_stands_by
from .inputs import Member


class _Saved(NamedTuple):
    """What was saved for one parameter.

    Attributes:
        name: what to call the parameter.
        member: the parameter.
        entries: its state.
    """

    name: str
    member: Member
    entries: Mapping[str, Any]


def load_checked(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state into an optimizer, as its own `load_state_dict` does.

    Raises:
        MPCompileError: it was saved for parameters of other shapes. Nothing has changed then.
    """
    if is_zero(optimizer):  # each rank loads a part
        optimizer.load_state_dict(state_dict)
        return
    # Behind the user's own hooks, which may rewrite the state, and before torch changes anything.
    handle = optimizer.register_load_state_dict_pre_hook(_check)
    try:
        optimizer.load_state_dict(state_dict)
    finally:
        handle.remove()


def _check(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    for saved in _saved(optimizer, state_dict):
        own, shapes = tuple(saved.member.param.shape), _shapes(saved.entries)
        if not shapes or (own in shapes.values() and {*shapes.values()} <= {own, ()}):
            continue  # as mostly: moments like the parameter, and counters
        for key, wanted in _shapes(_made(optimizer, saved.member)).items():
            if (found := shapes.get(key)) != wanted:
                what = "without" if found is None else f"with shape {found} for"
                raise MPCompileError(
                    f"MPOptimizer.load_state_dict: {saved.name}, of shape {own}, was saved {what} "
                    f"its state {key!r}, which has shape {wanted} here. It is the state of another "
                    "model, or of one whose parameters were handed over in another order. Nothing "
                    "was loaded"
                )


def _saved(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[_Saved]:
    """What was saved for each parameter. (Where groups differ, torch says so.)"""
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    count = itertools.count()
    for number, (group, saved) in enumerate(groups):
        names = group.get("param_names", ())
        for i, (param, who) in enumerate(zip(group["params"], saved["params"], strict=False)):
            index = next(count)
            entries = state_dict["state"].get(who, {})
            name = f"parameter {index}" + (f" ({names[i]})" if i < len(names) else "")
            yield _Saved(name, Member(number, param), entries)


def _shapes(entries: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {k: tuple(v.shape) for k, v in entries.items() if isinstance(v, torch.Tensor)}


def _made(optimizer: Optimizer, member: Member) -> dict[str, Any]:
    """The state of a parameter as it is now, or would be made before its first step."""
    if known := optimizer.state.get(member.param):
        return dict(known)
    with state_stands_by(optimizer, [member]):
        made = dict(optimizer.state.get(member.param, {}))
    optimizer.state.pop(member.param, None)
    return made
