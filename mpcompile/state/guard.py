"""Whether an optimizer may take its step: no optimizer uses a gradient that came out of a compiled
graph and is not finite.

    optimizer.step()    for each loss scale of its parameters: did a backward overflow since this
                        optimizer last looked, or is a gradient of these parameters not finite?
                        for its other parameters (of a plain network before a compiled one, of
                        FSDP's shards): did a backward of a graph that may come after them
                        overflow, and is one of their own gradients not finite?
                        if so: hide the gradients, so that the step changes nothing, and put them
                        back after it

For plain optimizers, torch's step hooks (`hooks.py`) ask this, on the host. A generated step
(`MPOptimizer`) asks on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch.optim import Optimizer

from . import optimizers, parameters
from .loss_scale import LossScale
from .overflows import Count, any_nonfinite

# the scales that some graph uses
_live: weakref.WeakSet[LossScale] = weakref.WeakSet()
# called whenever a graph's scale becomes known
_listeners: weakref.WeakSet[ScaleListener] = weakref.WeakSet()


class ScaleListener(Protocol):
    """An object that is told when the scales of its parameters become known."""

    def scales_appeared(self) -> None: ...


def listen(listener: ScaleListener) -> None:
    """Call `listener.scales_appeared()` after each call of `watch`, while the listener lives."""
    _listeners.add(listener)


def watch(trained: Sequence[torch.Tensor], scale: LossScale) -> None:
    """Tell optimizers that hold these parameters which scale their gradients depend on."""
    _live.add(scale)
    scale.overflows.watch(trained)
    for parameter in trained:
        known = parameters.scales_of(parameter)
        if scale not in known:
            parameters.note(parameter, scales=(*known, scale))
    for listener in list(_listeners):
        listener.scales_appeared()


def is_needed() -> bool:
    """Whether anything in this process is scaled."""
    return bool(_live)


def scales() -> list[LossScale]:
    """The scales that some graph uses."""
    return list(_live)


def skips_by_itself(optimizer: Optimizer) -> None:
    """Leave this optimizer's steps alone: they check the gradients themselves."""
    optimizers.state_of(optimizer).skips_by_itself = True


def look(optimizer: Optimizer, scale: LossScale, *, upstream: bool = False) -> torch.Tensor | None:
    """How many backward passes of the scale's graphs overflowed since this optimizer last looked:
    0-d int64 on the device, or None where none ran. This call counts as a look.

    Backward passes whose gradients were thrown away before the last forward are not counted, unless
    the optimizer's parameters come before the graphs (`upstream`): their gradients may still exist.
    """
    looks, overflows = optimizers.state_of(optimizer).looks, scale.overflows
    overflows.lookers.add(optimizer)
    count, earlier = overflows.count(), looks.get(scale, Count())
    if not upstream:
        earlier = earlier.or_later(overflows.void)
    looks[scale] = count
    return count.since(earlier)


def skip_if_overflowed(optimizer: Optimizer) -> None:
    """Hide the gradients from the coming step, if any of them must not be used; waits for the
    device. Call `show_hidden` after the step.
    """
    held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    gradients = [(p, grad) for p, grad in held if grad is not None]
    if not gradients:
        return
    # Each scale is judged by the gradients of its own graphs; any overflow skips the whole step.
    own: dict[LossScale, list[torch.Tensor]] = {
        s: [] for p, _ in held for s in parameters.scales_of(p)
    }
    others: list[torch.Tensor] = []
    for parameter, gradient in gradients:
        scales = parameters.scales_of(parameter)
        for scale in scales:
            own[scale].append(gradient)
        if not scales:
            others.append(gradient)
    looked = {scale: look(optimizer, scale) for scale in own}
    answers = {scale: _overflowed(own[scale], overflows) for scale, overflows in looked.items()}
    # Parameters that may come before these graphs (or whose gradients an earlier backward left).
    before = [scale for scale in own if scale.open]
    upstream = bool(others) and bool(before) and bool(any_nonfinite(others))
    if upstream and not any(answers[scale] for scale in before):  # blame every scale that ran
        answers.update({scale: True for scale in before if looked[scale] is not None})
    for scale, answer in answers.items():
        scale.settle(answer)
    skip = upstream or any(answers.values())
    skip |= bool(others) and _upstream_overflowed(optimizer, others, own)
    if skip:
        optimizers.state_of(optimizer).hidden += gradients
        for parameter, _ in gradients:
            parameter.grad = None


def show_hidden(optimizer: Optimizer) -> None:
    """Put the gradients back that were hidden from the step."""
    hidden = optimizers.state_of(optimizer).hidden
    for parameter, gradient in hidden:
        if parameter.grad is None:
            parameter.grad = gradient
    hidden.clear()


def _overflowed(gradients: Sequence[torch.Tensor], overflows: torch.Tensor | None) -> bool:
    found = any_nonfinite(gradients)
    return bool(found if overflows is None else found.to(overflows.device) | (overflows > 0))


def _upstream_overflowed(
    optimizer: Optimizer, gradients: list[torch.Tensor], own: Iterable[LossScale]
) -> bool:
    """Whether gradients of parameters that no graph reads came out of an overflow in some graph.

    Such parameters may come before a compiled model (a generator before its critic), or be shards
    of parameters that it reads whole: FSDP's DTensors, each with a part of the gradient. For these
    all ranks must decide alike, so the gradients alone decide, and they move the scale.
    """
    sharded = any(hasattr(gradient, "device_mesh") for gradient in gradients)
    others = set(_live).difference(own)
    state = optimizers.state_of(optimizer)
    before = [s for s in others if s.open or sharded]
    ran = [s for s in before if s.overflows.count().passes > state.looks.get(s, Count()).passes]
    if not ran and not state.poisoned:
        return False
    overflow = bool(any_nonfinite(gradients))
    if sharded:
        for scale in ran:
            look(optimizer, scale)
            scale.settle(overflow)
        return overflow
    looked = [(scale, look(optimizer, scale, upstream=True)) for scale in ran]
    if not overflow:
        state.poisoned = False
        return False
    guilty = [scale for scale, overflows in looked if overflows is not None and bool(overflows)]
    for scale in guilty:
        scale.skip_for()
    if guilty:
        state.poisoned = True
    return state.poisoned
