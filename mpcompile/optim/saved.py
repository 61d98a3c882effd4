"""What an optimizer's checkpoint holds: its state, and the loss scales of its models.

The state is loaded only if it is of parameters like these. Each scale goes back to the model it
came from. Scales belong to models, and a checkpoint is mostly loaded before the first forward, when
no scale is known yet. So each is saved with the indices of the parameters whose gradients it
scales, and waits until a model with these parameters runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import MPCompileError, shortened
from ..ranks.zero import is_zero
from ..scaling.loss_scale import LossScale
from ..scaling.parameters import parameters_of
from .first_state import gradients_stand_by, initialise_state
from .masters import in_fp32
from .members import Member

_PARAMETERS = "parameters"


def saved(scale: LossScale, parameters: Collection[int]) -> dict[str, Any]:
    """A scale's state and the indices of its parameters in the optimizer."""
    return {**scale.state_dict(), _PARAMETERS: sorted(parameters)}


class SavedScales:
    """The scales of a checkpoint that wait for their models."""

    def __init__(self, entries: Sequence[Mapping[str, Any]] = ()) -> None:
        self.waiting = list(entries)
        self._restored: weakref.WeakSet[LossScale] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedScales, (self.waiting,)  # a copy knows no scale yet

    def restore(
        self, known: Mapping[LossScale, Collection[int]], *, appeared: bool = False
    ) -> None:
        """Load into each known scale the entry saved for its parameters. A scale whose own state
        was loaded separately keeps that state.

        Args:
            appeared: a model ran after the checkpoint was loaded. Its scale may be in use already;
                another optimizer of the checkpoint that holds the model may have loaded it then.
        """
        for scale, parameters in known.items():
            if scale in self._restored:
                continue
            likeness = {i: _likeness(e, set(parameters)) for i, e in enumerate(self.waiting)}
            best = max(likeness, key=likeness.__getitem__, default=None)
            if best is not None and likeness[best] >= 0:
                entry = self.waiting.pop(best)
                self._restored.add(scale)
                if not (scale.restored if appeared else scale.loaded):
                    scale.load_state_dict(entry)
                scale.loaded = False


def _likeness(entry: Mapping[str, Any], parameters: set[int]) -> float:
    """The share of parameters that both sets have in common; 0 for a GradScaler's entry (no set).

    A model may have run more or fewer of its graphs when it was saved than now. If each set has
    parameters that the other lacks, the entry is of another model that shares some: negative.
    """
    theirs = set(entry.get(_PARAMETERS, ()))
    if theirs - parameters and parameters - theirs:
        return -1.0
    return len(theirs & parameters) / max(len(theirs | parameters), 1)


# -- the state -------------------------------------------------------------------------------------


def counters_on_host(state: dict[str, Any]) -> dict[str, Any]:
    """A state with step counters where torch saves them."""
    for group in state["param_groups"]:
        if not (group.get("capturable") or group.get("fused")):
            for index in group["params"]:
                entry = state["state"].get(index, {})
                if isinstance(entry.get("step"), torch.Tensor):
                    state["state"][index] = {**entry, "step": entry["step"].cpu()}
    return state


def load_checked(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state into an optimizer, as its own `load_state_dict` does.

    Raises:
        MPCompileError: it was saved for parameters of other shapes. Nothing has changed then.
    """
    if is_zero(optimizer):  # each rank loads a part
        optimizer.load_state_dict(state_dict)
        return
    # After the user's own hooks, which may rewrite the state, and before torch changes anything.
    handle = optimizer.register_load_state_dict_pre_hook(_check)
    try:
        with in_fp32(optimizer):  # torch casts state to the dtype of its parameter
            optimizer.load_state_dict(state_dict)
    finally:
        handle.remove()


def _check(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    if "param_groups" not in state_dict:
        raise MPCompileError(
            f"MPOptimizer.load_state_dict: {shortened(list(state_dict))} are not the keys of an "
            "optimizer's state. Is it that of the model?"
        )
    for name, member, entries in _entries_of(optimizer, state_dict):
        own, shapes = tuple(member.param.shape), _shapes(entries)
        if not shapes or (own in shapes.values() and {*shapes.values()} <= {own, ()}):
            continue  # as mostly: moments like the parameter, and counters
        for key, wanted in _shapes(_made(optimizer, member)).items():
            if (found := shapes.get(key)) != wanted:
                what = "without" if found is None else f"with shape {found} for"
                raise MPCompileError(
                    f"MPOptimizer.load_state_dict: {name}, of shape {own}, was saved {what} "
                    f"its state {key!r}, which has shape {wanted} here. It is the state of another "
                    "model, or of one whose parameters were handed over in another order. Nothing "
                    "was loaded"
                )


def _entries_of(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[str, Member, Mapping[str, Any]]]:
    """What to call each parameter, it, and the state that was saved for it. (Where groups differ,
    torch says so.)
    """
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    count = itertools.count()
    for number, (group, saved) in enumerate(groups):
        names = group.get("param_names", ())
        for i, (param, who) in enumerate(zip(group["params"], saved["params"], strict=False)):
            index = next(count)
            entries = state_dict["state"].get(who, {})
            name = f"parameter {index}" + (f" ({names[i]})" if i < len(names) else "")
            yield name, Member(number, param), entries


def _shapes(entries: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {k: tuple(v.shape) for k, v in entries.items() if isinstance(v, torch.Tensor)}


def _made(optimizer: Optimizer, member: Member) -> dict[str, Any]:
    """The state of a parameter as it is now, or would be made before its first step."""
    if known := optimizer.state.get(member.param):
        return dict(known)
    with gradients_stand_by(parameters_of(optimizer), [member.param]):
        initialise_state(optimizer, [member])
    made: dict[str, Any] = optimizer.state.pop(member.param, {})
    return made
