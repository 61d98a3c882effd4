"""Whether an optimizer may take its step: no optimizer uses a gradient that came out of a compiled
graph and is not finite.

    optimizer.step()    for each loss scale of its parameters: did a backward overflow since this
                        optimizer last looked, or is a gradient of these parameters not finite?
                        for its other parameters (of a plain network before a compiled one): did a
                        backward of a graph that may come after them overflow, and is one of their
                        own gradients not finite?
                        if so: hide the gradients, so that the step changes nothing, and put them
                        back after it

Where FSDP has sharded the parameters, a graph reads whole parameters and the optimizer holds
shards, DTensors, which depend on the same scales. What one rank found there is no more than a part
of the answer: one collective in the step makes it common to all.

For plain optimizers, torch's step hooks (`hooks.py`) ask this, on the host. A generated step
(`MPOptimizer`) asks on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..devices.registry import capabilities
from ..ranks import fsdp
from ..ranks.shards import Ranks, is_distributed, ranks_of
from . import agreement, parameters
from .loss_scale import LossScale
from .overflows import Count, any_nonfinite

# the scales that some graph uses; each is held by its graphs, and by the parameters that they read
_live: weakref.WeakSet[LossScale] = weakref.WeakSet()


def watch(trained: Sequence[torch.Tensor], scale: LossScale) -> list[fsdp.Shard]:
    """Tell optimizers that hold these parameters, or shards of them, which scale their gradients
    depend on. Returns the shards.
    """
    _live.add(scale)
    shards = fsdp.shards_of(trained)
    trained = [*trained, *(shard.parameter for shard in shards)]
    scale.overflows.watch(trained)
    for parameter in trained:
        known = parameters.scales_of(parameter)
        if scale not in known:
            parameters.note(parameter, scales=(*known, scale))
    for owner in {parameters.owner_of(parameter) for parameter in trained} - {None}:
        owner.scales_appeared()
    return shards


def is_needed() -> bool:
    return bool(_live)


def look(optimizer: Optimizer, scale: LossScale, *, upstream: bool = False) -> torch.Tensor | None:
    """See `Overflows.look`. What all ranks have found where the optimizer holds parameters of a
    DDP, which must stay the same on all ranks, and others of this scale, whose gradients each rank
    has for itself.

    Args:
        upstream: the optimizer's parameters come before the graphs.
    """
    overflows = scale.overflows  # an MPOptimizer's own scale has never any
    new = overflows.look(optimizer, upstream=upstream) if overflows.began else None
    ranks, own = agreement.beside(optimizer, scale)
    if not ranks:
        return new
    bad = any_nonfinite([p.grad for p in own if p.grad is not None])
    count = bad.to(ranks.device, torch.int64)
    return ranks.all_max(count if new is None else count + new.to(ranks.device))


def skip_if_overflowed(optimizer: Optimizer) -> bool:
    """Hide the gradients from the coming step, if any of them must not be used; returns whether it
    has. Waits for the device. Call `show_hidden` after the step.
    """
    held = parameters.parameters_of(optimizer) if is_needed() else ()
    gradients = [(p, p.grad) for p in held if p.grad is not None]
    if not gradients:
        return False
    # Each scale is judged by the gradients of its own graphs; any overflow skips the whole step.
    own: dict[LossScale, list[torch.Tensor]] = {}
    for parameter in held:
        for scale in parameters.scales_of(parameter):
            of_scale = own.setdefault(scale, [])
            if parameter.grad is not None:
                of_scale.append(parameter.grad)
    others = [gradient for p, gradient in gradients if not parameters.scales_of(p)]
    state = parameters.of_optimizer(optimizer)
    # Nothing is known of parameters that torch has swapped, till their next forward: others.
    lost = [s for s in state.scales if others and s not in own and _ran_since(s, optimizer)]
    state.scales = weakref.WeakSet(own)
    own |= {scale: [] for scale in lost}
    ranks = ranks_of(held)
    looked = {scale: look(optimizer, scale) for scale in own}
    # Other parameters may come before these graphs (or have gradients that an earlier backward
    # left), or before graphs of which the optimizer holds nothing.
    before = [scale for scale in own if scale.open and scale not in lost]
    after = _upstream_of(optimizer, others, own)
    asked = bool(before or after or state.poisoned) and bool(others)
    if not own and not asked:
        return False
    found = [overflowed(own[scale], overflows) for scale, overflows in looked.items()]
    if asked or ranks:  # all ranks exchange as many
        found.append(any_nonfinite(others if asked else ()))
    common = _common(found, ranks)
    bad = len(common) > len(own) and common.pop()
    answers = dict(zip(own, common, strict=True))
    upstream = bad and bool(before)
    if upstream and not any(answers[scale] for scale in before):  # blame every scale that ran
        answers.update({scale: True for scale in before if looked[scale] is not None})
    for scale, answer in answers.items():
        scale.settle(answer)
    skip = upstream or any(answers.values())
    skip |= asked and _upstream_overflowed(optimizer, after, bad)
    if skip:
        state.hidden += gradients
        for parameter, _ in gradients:
            parameter.grad = None
    return skip


def show_hidden(optimizer: Optimizer) -> None:
    hidden = parameters.of_optimizer(optimizer).hidden
    for parameter, gradient in hidden:
        if parameter.grad is None:
            parameter.grad = gradient
    hidden.clear()


def overflowed(gradients: Sequence[torch.Tensor], overflows: torch.Tensor | None) -> torch.Tensor:
    """Whether one of these is not finite, or a look has found an overflow: 0-d bool."""
    found = any_nonfinite(gradients)
    return found if overflows is None else found.to(overflows.device).logical_or(overflows)


def _common(flags: Sequence[torch.Tensor], ranks: Ranks) -> list[bool]:
    """The flags (0-d bool), each true if it is on any of the ranks."""
    known = [flag.device for flag in flags]
    device = next((d for d in known if capabilities(d).asynchronous), known[0])
    # Only where they differ: a copy from the host to a GPU would wait for it.
    moved = [flag if flag.device == device else flag.to(device) for flag in flags]
    together = torch.stack(moved) if len(moved) > 1 else moved[0].reshape(1)
    return [bool(flag) for flag in ranks.all_max(together).tolist()]


def decide_alike() -> bool:
    """Whether other ranks train the same parameters, so that all must decide alike."""
    return is_distributed() and dist.get_world_size() > 1


def _upstream_of(
    optimizer: Optimizer, others: Sequence[torch.Tensor], own: Iterable[LossScale]
) -> list[LossScale]:
    """The scales of graphs that read none of the optimizer's parameters, have run backward since
    its last look, and may come after its other parameters (a critic after its generator).
    """
    before = [s for s in _live if s.open and s not in own] if others else []
    return [scale for scale in before if _ran_since(scale, optimizer)]


def _ran_since(scale: LossScale, optimizer: Optimizer) -> bool:
    """Whether graphs of the scale have run backward since the optimizer's last look."""
    look = scale.overflows.looks.get(optimizer, Count())
    return scale.overflows.count().passes > look.passes


def _upstream_overflowed(optimizer: Optimizer, ran: Sequence[LossScale], overflow: bool) -> bool:
    """Whether gradients of parameters that no graph reads came out of an overflow in some graph.

    Args:
        ran: see `_upstream_of`.
        overflow: whether one of these gradients is not finite.
    """
    state = parameters.of_optimizer(optimizer)
    if not ran and not state.poisoned:
        return False
    looked = [(scale, look(optimizer, scale, upstream=True)) for scale in ran]
    if not overflow:
        state.poisoned = False
        return False
    if decide_alike():  # the gradients are the same on all ranks, but each counts its own overflows
        for scale in ran:
            scale.settle(True)
        state.poisoned = True
        return True
    guilty = [scale for scale, overflows in looked if overflows is not None and bool(overflows)]
    for scale in guilty:
        scale.skip_for()
    state.poisoned |= bool(guilty)
    return state.poisoned
