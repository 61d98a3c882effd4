"""Who may take a step: no optimizer uses a gradient that came out of a compiled graph and is not
finite.

    optimizer.step()    of each loss scale behind its parameters: did a backward overflow since this
                        optimizer looked last, or is a gradient of these parameters not finite?
                        of its other parameters (of a plain network before a compiled one, of
                        FSDP's shards): did a backward of a graph that they may stand before
                        overflow, and is one of their own gradients not finite?
                        if so: hide the gradients, so that the step changes nothing; show them again
                        after it

torch's public step hooks see every optimizer of the process; what they ask costs one host
synchronisation, as GradScaler's does, and nothing where nothing is scaled. A generated step
(`MPOptimizer`) asks on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from .loss_scale import Count, LossScale, any_nonfinite

_changes = 0

# parameter -> the LossScales of the graphs that read it
_scales_of = WeakIdKeyDictionary()
# the scales that some graph uses
_live: weakref.WeakSet[LossScale] = weakref.WeakSet()
# called whenever a graph's scale becomes known
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
# optimizers whose step skips by itself
_self_skipping: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# optimizer -> scale -> where it looked last
_looks: weakref.WeakKeyDictionary[Optimizer, weakref.WeakKeyDictionary[LossScale, Count]] = (
    weakref.WeakKeyDictionary()
)
# optimizers that hold, and have skipped for, an upstream gradient that overflowed
_poisoned: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_hidden: weakref.WeakKeyDictionary[Optimizer, list[tuple[torch.Tensor, torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)


class Listener(Protocol):
    """Who waits for the scales of its parameters."""

    def scales_appeared(self) -> None: ...


def listen(listener: Listener) -> None:
    """Call `listener.scales_appeared()` after each call of `watch`, as long as it lives."""
    _listeners.add(listener)


def watch(parameters: Sequence[torch.Tensor], scale: LossScale) -> None:
    """Let optimizers that hold these parameters know whose scale their gradients depend on."""
    global _changes
    _live.add(scale)
    scale.scales(parameters)
    for parameter in parameters:
        scales = _scales_of.setdefault(parameter, [])
        if not any(known is scale for known in scales):
            scales.append(scale)
            _changes += 1
    for listener in list(_listeners):
        listener.scales_appeared()


def changes() -> int:
    """Grows whenever some parameter got a scale: what was known of `scales_of` may be outdated."""
    return _changes


def scales_of(parameter: torch.Tensor) -> Sequence[LossScale]:
    """The scales of all graphs over this parameter."""
    known: Sequence[LossScale] = _scales_of.get(parameter, ())
    return known


def scale_of(parameters: Iterable[torch.Tensor]) -> LossScale | None:
    """The scale that graphs over these parameters already use, if any."""
    return next((s for p in parameters for s in _scales_of.get(p, ())), None)


def skips_by_itself(optimizer: Optimizer) -> None:
    """Leave this optimizer's steps alone: they look at the gradients themselves."""
    _self_skipping.add(optimizer)


def skipping_itself(optimizer: Optimizer) -> bool:
    return optimizer in _self_skipping


def look(optimizer: Optimizer, scale: LossScale, *, upstream: bool = False) -> torch.Tensor | None:
    """How many backward passes of the scale's graphs overflowed since this optimizer looked last:
    0-d int64 on the device, or None where none ran. It has looked now.

    Not counted are those whose gradients were thrown away before the last forward, unless the
    optimizer's parameters stand `upstream` of the graphs: what became of those nobody knows.
    """
    looks = _looks.setdefault(optimizer, weakref.WeakKeyDictionary())
    scale.lookers.add(optimizer)
    count, earlier = scale.count(), looks.get(scale, Count())
    if not upstream:
        earlier = max(earlier, scale.void(), key=lambda c: c.passes)
    looks[scale] = count
    return count.since(earlier)


# -- torch's hooks --------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if skipping_itself(optimizer):
        return None
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if closure is None:
        _skip_if_overflowed(optimizer)
        return None
    # The gradients are made inside the step: look at them right after the closure has run. (It may
    # even be what compiles the model, so there is nothing to know about the parameters before.)
    checked = _checked_closure(optimizer, closure)
    return (args[0], *args[2:]), {**kwargs, "closure": checked}


def _checked_closure(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        loss = closure()
        _skip_if_overflowed(optimizer)
        return loss

    return run


def _skip_if_overflowed(optimizer: Optimizer) -> None:
    if not _live:
        return  # nothing in this process is scaled
    held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    gradients = [(p, grad) for p, grad in held if grad is not None]
    if not gradients:
        return
    # Each scale answers for the gradients of its own graphs; any overflow skips the whole step.
    own: dict[LossScale, list[torch.Tensor]] = {s: [] for p, _ in held for s in scales_of(p)}
    others: list[torch.Tensor] = []
    for parameter, gradient in gradients:
        scales = scales_of(parameter)
        for scale in scales:
            own[scale].append(gradient)
        if not scales:
            others.append(gradient)
    looked = {scale: look(optimizer, scale) for scale in own}
    answers = {scale: _overflowed(own[scale], overflows) for scale, overflows in looked.items()}
    # Parameters that may stand before these graphs (or whose gradients another pass has left).
    before = [scale for scale in own if scale.open]
    upstream = bool(others) and bool(before) and bool(any_nonfinite(others))
    if upstream and not any(answers[scale] for scale in before):  # nobody knows which it was
        answers.update({scale: True for scale in before if looked[scale] is not None})
    for scale, answer in answers.items():
        scale.settle(answer)
    skip = upstream or any(answers.values())
    skip |= bool(others) and _upstream_overflowed(optimizer, others, own)
    if skip:
        hidden = _hidden.setdefault(optimizer, [])
        for parameter, gradient in gradients:
            hidden.append((parameter, gradient))
            parameter.grad = None


def _overflowed(gradients: Sequence[torch.Tensor], overflows: torch.Tensor | None) -> bool:
    found = any_nonfinite(gradients)
    return bool(found if overflows is None else found.to(overflows.device) | (overflows > 0))


def _upstream_overflowed(
    optimizer: Optimizer, gradients: list[torch.Tensor], own: Iterable[LossScale]
) -> bool:
    """Whether gradients of parameters that no graph reads came out of an overflow in some graph.

    They may stand before a compiled model (a generator before its critic), or be the shards of
    parameters that it reads whole (FSDP's DTensors, each with a part of the gradient: there all
    ranks must decide alike, so the gradients alone decide, and they move the scale).
    """
    sharded = any(hasattr(gradient, "device_mesh") for gradient in gradients)
    others = set(_live).difference(own)
    known = _looks.setdefault(optimizer, weakref.WeakKeyDictionary())
    before = [s for s in others if s.open or sharded]
    ran = [s for s in before if s.count().passes > known.get(s, Count()).passes]
    if not ran and optimizer not in _poisoned:
        return False
    overflow = bool(any_nonfinite(gradients))
    if sharded:
        for scale in ran:
            look(optimizer, scale)
            scale.settle(overflow)
        return overflow
    looked = [(scale, look(optimizer, scale, upstream=True)) for scale in ran]
    if not overflow:
        _poisoned.discard(optimizer)
        return False
    guilty = [scale for scale, overflows in looked if overflows is not None and bool(overflows)]
    for scale in guilty:
        scale.skip_for()
    if guilty:
        _poisoned.add(optimizer)
    return optimizer in _poisoned


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for parameter, gradient in _hidden.pop(optimizer, ()):
        if parameter.grad is None:
            parameter.grad = gradient


# torch's public hooks for every optimizer. They cost one length check while nothing is scaled.
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
