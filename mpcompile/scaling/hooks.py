"""Torch's public step hooks: they run before and after each step of every optimizer of the process.

They cost one look-up while no loss scale exists. While one does, a plain optimizer's step costs one
host synchronisation, as GradScaler's does. An MPOptimizer's step checks on the device; these hooks
skip it. Of a step's arguments they know the closure alone, and hand on all others. A GradScaler
that steps an optimizer of scaled parameters is warned of: nobody is to get two loss scales.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import warn
from ..ir.dtypes import HALF
from ..ranks.zero import is_zero, partition_of
from ..torch_inside.optimizers import global_hooks, has_hooks
from . import agreement, guard, parameters

_CLOSURE = "closure"
# What torch puts around each step; it calls the hooks, and then its `func`.
_HOOKED_STEP = Optimizer.profile_hook_step(Optimizer.step).__code__

_SCALERS_STEP = torch.amp.GradScaler.step.__code__

_beside: list[Callable[[Optimizer], None]] = []


def look_before_steps(look: Callable[[Optimizer], None]) -> None:
    """Have `look` called before each step, too, from now on. It shares the hook, since each costs
    some microseconds in every step of the process.
    """
    register()
    if look not in _beside:
        _beside.append(look)


@functools.cache
def register() -> None:
    """Install the hooks, once. `mpcompile()` and the backend do this before anything is compiled:
    the closure of a step may be what compiles the first graph.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    for look in _beside:
        look(optimizer)
    if guard.is_needed():
        _look_for_scaler(optimizer)
    agreement.before_step(optimizer)
    _look_for_masters(optimizer)
    by_itself = parameters.of_optimizer(optimizer).skips_by_itself
    if is_zero(optimizer):  # this look is also that of the optimizer that it steps
        parameters.of_optimizer(partition_of(optimizer)).skips_by_itself = True
    place = _place_of_closure(optimizer, args, kwargs)
    _look_for_gradient(optimizer, has_closure=place is not None)
    if place is None:
        skips = not by_itself and guard.skip_if_overflowed(optimizer)
        if not skips or _is_torchs(_called_step(optimizer)):
            return None
        return (_of_others(optimizer), *args[1:]), kwargs
    # The gradients are made inside the step: check them right after the closure has run. (It may
    # even compile the model, so nothing is known about the parameters before.)
    given: Any = dict(kwargs) if isinstance(place, str) else list(args)
    inner = [x for x in vars(optimizer).values() if isinstance(x, Optimizer)]
    stepped = {id(p) for one in inner for p in parameters.parameters_of(one)}
    if not is_zero(optimizer):  # as SAM's, whose weights the step of the other one writes
        by_itself |= stepped >= {id(p) for p in parameters.parameters_of(optimizer)}
    given[place] = _checked_closure(optimizer, given[place], by_itself=by_itself)
    return (args, given) if isinstance(place, str) else (tuple(given), kwargs)


def _is_torchs(step: Any) -> bool:
    """Whether a step is torch's own: it passes over parameters without a gradient."""
    return str(getattr(step, "__module__", "")).startswith("torch.")


def _of_others(optimizer: Optimizer) -> Optimizer:
    """What takes a step in the place of one that skips it. It has a copy of the smallest trained
    parameter of each group, all zeros: not each step passes over a parameter without a gradient
    (one may fail there, or make zeros and decay the weight), nor over a group without parameters.
    """
    stand_in = object.__new__(type(optimizer))
    hidden = dict(parameters.of_optimizer(optimizer).hidden)
    kept: dict[Any, Any] = dict(optimizer.state)
    state = collections.defaultdict[Any, Any](dict)
    state.update((key, kept[key]) for key in kept if not isinstance(key, torch.Tensor))
    groups = []
    for group in optimizer.param_groups:
        groups.append({**group, "params": []})
        for param in sorted(group["params"], key=lambda p: (p not in hidden, p.numel()))[:1]:
            other = torch.nn.Parameter(torch.zeros_like(param))
            other.grad = torch.zeros_like(hidden.get(param, other))
            state[other] = copy.deepcopy(optimizer.state.get(param, {}))
            groups[-1]["params"].append(other)
    vars(stand_in).update(vars(optimizer), param_groups=groups, state=state)
    return stand_in


def _place_of_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | str | None:
    """Which argument of a step is its closure: one that the step names `closure`. The number of a
    positional one, "closure" if it is given by its name, or None. All else is the optimizer's own.
    """
    if callable(kwargs.get(_CLOSURE)):
        return _CLOSURE
    callables = [i for i, arg in enumerate(args) if i and callable(arg)]
    if not callables:
        return None
    bases = (vars(cls).get("step") for cls in type(optimizer).__mro__)
    for step in (_called_step(optimizer), *filter(None, bases)):
        with contextlib.suppress(TypeError):  # of what is no Python function, which tells nothing
            known = inspect.getfullargspec(inspect.unwrap(step))
            if _CLOSURE in known.args:
                place = known.args.index(_CLOSURE)
                return place if place in callables else None
            if not known.varargs:  # which go to the step of a base class, which names them
                return None
    return None


def _called_step(optimizer: Optimizer) -> Any:
    """The function that the step is: that of the optimizer's class or, called by it, of a base,
    which may take other arguments.
    """
    frame = _frame_of(_HOOKED_STEP)
    return type(optimizer).step if frame is None else frame.f_locals["func"]


def _checked_closure(
    optimizer: Optimizer, closure: Callable[..., Any], *, by_itself: bool
) -> Callable[..., Any]:
    @functools.wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        agreement.before_step(optimizer)
        if not by_itself:
            guard.skip_if_overflowed(optimizer)
        return loss

    return run


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    guard.show_hidden(optimizer)


def trains(inputs: Iterable[Any]) -> None:
    """A graph was compiled with these inputs: those of its weights that are stored in a half dtype
    want an optimizer that keeps FP32 masters.
    """
    for x in inputs if torch.is_grad_enabled() else ():
        if isinstance(x, torch.nn.Parameter) and x.dtype in HALF and x.requires_grad:
            parameters.note(x, has_half_graph=True)


def _look_for_masters(optimizer: Optimizer) -> None:
    """Warn of weights that are stored in a half dtype and updated without FP32 masters.

    BF16 has eight significant bits: an update of less than 0.2% of a weight rounds to nothing, so
    at the learning rates of fine-tuning most weights never move. An `MPOptimizer` keeps masters. Of
    other optimizers, those of torch are known not to; what a library's own do, nobody here knows.
    """
    state = parameters.of_optimizer(optimizer)
    if state.looked_for_masters >= parameters.changes() or state.skips_by_itself:
        return
    state.looked_for_masters = parameters.changes()
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    held = parameters.parameters_of(optimizer)
    if low := [p for p in held if parameters.state_of(p).has_half_graph and p.dtype in HALF]:
        state.looked_for_masters = sys.maxsize
        name, dtype = type(optimizer).__name__, str(low[0].dtype).removeprefix("torch.")
        warn(
            f"mpcompile: {name} updates weights that are stored in {dtype} (one of shape "
            f"{tuple(low[0].shape)}), without FP32 masters: an update of less than 0.2% of a "
            f"weight is lost. Use MPOptimizer({name}(...)), which keeps masters, or call "
            "model.float() before"
        )


def _look_for_scaler(optimizer: Optimizer) -> None:
    """Warn if a GradScaler is stepping this optimizer, whose gradients a loss scale of ours scales.
    Looks at the first step at which they are scaled.
    """
    state = parameters.of_optimizer(optimizer)
    if state.looked_for_scaler:
        return
    held = parameters.parameters_of(optimizer)
    if not any(scale.active for p in held for scale in parameters.scales_of(p)):
        return
    state.looked_for_scaler = True
    # Optimizers aren't told: only a fused one gets the scaler's tensors.
    frame = _frame_of(_SCALERS_STEP)
    scaler: Any = None if frame is None else frame.f_locals.get("self")
    if scaler is not None and scaler.is_enabled():
        warn(
            f"a GradScaler steps {type(optimizer).__name__}, whose gradients mpcompile scales, "
            "unscales and checks: two loss scales, and an overflow skips a step under each. Leave "
            "the GradScaler out: loss.backward(), optimizer.step(). Or leave scaling to it: "
            'mpcompile(..., loss_scale="none")'
        )


def _frame_of(code: CodeType) -> FrameType | None:
    """The innermost call of this code that is running, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def has_others(optimizer: Optimizer) -> bool:
    """Whether hooks other than these run around the optimizer's steps."""
    if has_hooks(optimizer):
        return True
    room = f"{__name__.partition('.')[0]}."  # ours need no step to be called
    modules = [getattr(hook, "__module__", None) or "" for hook in global_hooks()]
    return not all(module.startswith(room) for module in modules)


def _look_for_gradient(optimizer: Optimizer, *, has_closure: bool) -> None:
    """Warn of an optimizer whose first step finds no gradient, and so changes nothing: mostly it
    steps before the backward, or after `zero_grad()`. A closure makes the gradients by itself.
    """
    state = parameters.of_optimizer(optimizer)
    was_looked_for, state.looked_for_gradient = state.looked_for_gradient, True
    if was_looked_for or has_closure:
        return
    held = parameters.parameters_of(optimizer)
    ours = state.skips_by_itself or any(parameters.scales_of(p) for p in held)
    if ours and held and all(p.grad is None for p in held):
        say_no_gradient(optimizer)


def say_no_gradient(optimizer: Optimizer) -> None:
    """Say that a step of this optimizer has no gradient."""
    parameters.of_optimizer(optimizer).looked_for_gradient = True
    warn(
        f"mpcompile: this step of {type(optimizer).__name__} changes nothing, since none of its "
        "parameters has a gradient: call loss.backward() before step(), and zero_grad() after it. "
        "Or are these the parameters of another model?"
    )
