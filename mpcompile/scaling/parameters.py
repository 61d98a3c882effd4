"""What is known of each parameter: one `ParamState` each, on its mark, and one count of changes.
And of each optimizer of the process that took a step or checks overflows itself.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ..torch_inside.tensors import TensorMark, mark_of, mark_on, marks_match, marks_of
from .loss_scale import LossScale


@dataclass(frozen=True)
class ParamState:
    """What is known of one parameter; `note` replaces it.

    Attributes:
        owner: the MPOptimizer whose step writes its copies, as a weak reference.
        given: the loss scale that the owner was given, for models without one from the user.
        copies: its working copies, by dtype; `copies.copies_of` gives them.
        in_full: whether its gradients must be FP32 and unscaled: a graph reads it in FP32, too, or
            its gradients are averaged over processes.
        scales: the loss scales of the graphs that read it.
        plans: of each graph that `torch.compile(backend="mpcompile")` compiled of it, the options
            and the plan.
        names: of its model's parameters, if a graph without a loss scale trains it.
        was_told: whether the user was warned of its training (`scaling/stays_finite.py`).
        has_half_graph: whether a graph trains it in a half dtype (`hooks.py`).
    """

    owner: weakref.ref[Any] | None = None
    given: LossScale | None = None
    copies: Mapping[torch.dtype, Any] = field(default_factory=dict)
    in_full: bool = False
    scales: tuple[LossScale, ...] = ()
    plans: tuple[tuple[Mapping[str, Any], Any], ...] = ()
    names: Callable[[], Mapping[int, str]] | None = None
    was_told: bool = False
    has_half_graph: bool = False

    @property
    def optimizer(self) -> Any:
        return self.owner() if self.owner is not None else None


_NOTHING = ParamState()


class _Changes:
    """A count. An object, since globals may be None when Python ends and the last owners go."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, _gone: object = None) -> None:
        self.count += 1


_changes = _Changes()


def changes() -> int:
    """A number that grows whenever something known of some parameter changes, or its gradients get
    another scale: whatever was derived before that may be outdated.
    """
    return _changes.count


def state_of(parameter: torch.Tensor) -> ParamState:
    mark = mark_on(parameter)
    known: ParamState | None = mark.state if mark is not None else None
    return _NOTHING if known is None else known


def note(parameter: torch.Tensor, **facts: Any) -> None:
    with _noting:
        before = state_of(parameter)
        after = dataclasses.replace(before, **facts)
        if after != before:
            mark_of(parameter).state = after
            _changes.add()


_noting = threading.RLock()


class Derived:
    """What was derived of parameters, for several lists of them in turn: Dynamo may run a graph
    with those of equal modules. Each list is known by its first one's id; none is kept alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[weakref.ref[TensorMark]], Any]] = {}

    def of(self, parameters: Sequence[torch.Tensor]) -> Any:
        """What was derived of these very tensors, or None."""
        marks, derived = self._known.get(id(parameters[0]), ((), None))
        return derived if marks and marks_match(marks, parameters) else None

    def note(self, parameters: Sequence[torch.Tensor], derived: Any) -> None:
        for key in [key for key, (marks, _) in self._known.items() if marks[0]() is None]:
            del self._known[key]
        self._known[id(parameters[0])] = marks_of(parameters), derived


def is_trained(value: Any) -> bool:
    """Whether an input is a tensor that gets a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_leaf(value: Any) -> bool:
    """Whether autograd stores a gradient in `value.grad`."""
    return is_trained(value) and value.is_leaf


def own(parameters: Iterable[torch.Tensor], owner: Any, scale: LossScale | None = None) -> None:
    """Make `owner` (an MPOptimizer) the optimizer whose step writes the copies of these parameters.
    With `scale`, models of these parameters without a loss scale from the user use this one.
    """
    living, _owners[owner] = weakref.ref(owner, _changes.add), scale
    for parameter in parameters:
        note(parameter, owner=living, given=scale)


_owners: weakref.WeakKeyDictionary[Any, LossScale | None] = weakref.WeakKeyDictionary()


def own_again(parameters: Sequence[torch.Tensor]) -> None:
    """Nothing is known of parameters that torch has swapped: their MPOptimizers own them again.
    Who else reads them is forgotten, so their gradients are FP32.
    """
    lost = {id(p) for p in parameters if mark_on(p) is None}
    for owner, scale in list(_owners.items()) if lost else ():
        found = [p for p in parameters_of(owner) if id(p) in lost]
        own(found, owner, scale)
        for parameter in found:
            note(parameter, in_full=True)


def owner_of(parameter: torch.Tensor) -> Any:
    """The living MPOptimizer that holds this parameter, or None."""
    own_again([parameter])
    return state_of(parameter).optimizer


def given_scale(parameters: Iterable[torch.Tensor]) -> LossScale | None:
    """The loss scale that the living MPOptimizer of these parameters was given, or None."""
    owned = (state_of(p).given for p in parameters if owner_of(p) is not None)
    return next((given for given in owned if given is not None), None)


def scales_of(parameter: torch.Tensor) -> tuple[LossScale, ...]:
    """The loss scales of all graphs that read this parameter."""
    return state_of(parameter).scales


def scale_of(parameters: Iterable[torch.Tensor]) -> LossScale | None:
    """A loss scale that graphs over these parameters already use, or None."""
    return next((s for p in parameters for s in scales_of(p)), None)


def note_plan(inputs: Iterable[Any], request: Mapping[str, Any], plan: Any) -> None:
    """Note that a graph was compiled of these inputs by the backend alone, with these options."""
    for one in inputs:
        if isinstance(one, torch.nn.Parameter):
            known = state_of(one).plans
            if all(plan is not other for _, other in known):
                note(one, plans=(*known, (request, plan)))


def plans_of(parameters: Iterable[torch.Tensor]) -> list[tuple[Mapping[str, Any], Any]]:
    """The options and the plan of each graph that the backend alone compiled of these parameters,
    in order.
    """
    return list({id(one[1]): one for p in parameters for one in state_of(p).plans}.values())


# -- optimizers ------------------------------------------------------------------------------------


class OptimizerState:
    """What is known of one optimizer.

    Attributes:
        skips_by_itself: its steps check the gradients themselves, as an MPOptimizer's do.
        poisoned: it holds, and has skipped for, a gradient that overflowed in a graph that reads
            none of its parameters.
        scales: those of the parameters that it held at its last step.
        looked_for_scaler: a step at which its gradients were scaled was looked at (`hooks.py`).
        looked_for_gradient: its first step was looked at (`hooks.py`).
        looked_for_masters: the count of `changes` at which a step was looked at for FP32 masters
            (`hooks.py`); past all counts once something was said.
        watch: what looks whether its gradients stay finite (`scaling/stays_finite.py`).
        hidden: (parameter, gradient) pairs that its step must not see.
    """

    def __init__(self) -> None:
        self.skips_by_itself = self.poisoned = False
        self.looked_for_scaler = self.looked_for_gradient = False
        self.looked_for_masters = -1
        self.watch: Any = None
        self.scales: weakref.WeakSet[LossScale] = weakref.WeakSet()
        self.hidden: list[tuple[torch.Tensor, torch.Tensor]] = []


# An optimizer's id -> the optimizer and its state. Each step asks several times, and a weak
# dictionary of torch's or Python's makes an object for each question.
_states: dict[int, tuple[weakref.ref[Optimizer], OptimizerState]] = {}


def of_optimizer(optimizer: Optimizer) -> OptimizerState:
    """The state of an optimizer, which callers change in place."""
    known = _states.get(id(optimizer))
    if known is not None and known[0]() is optimizer:
        return known[1]
    key, states = id(optimizer), _states
    alive = weakref.ref(optimizer, lambda _: states.pop(key, None))
    states[key] = alive, OptimizerState()
    return states[key][1]


def parameters_of(optimizer: Optimizer) -> tuple[torch.Tensor, ...]:
    """All parameters of an optimizer, in the order of its groups."""
    return tuple(p for group in optimizer.param_groups for p in group["params"])
