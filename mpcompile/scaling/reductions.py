"""What DistributedDataParallel (DDP) averages over ranks, and what is read off it.

    a forward under DDP     `enter`: under which scale one of our graphs runs
    its backward            the gradients are averaged: an overflow on one rank is one on all ranks;
                            at the end of the backward the averages are checked, so all ranks count
                            the same overflows, without a collective
    the first step          the ranks agree on the least start of each loss scale that a search of
                            one of them found

Gradients travel as DDP, or a communication hook of its user, lets them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..ranks import ddp
from ..ranks.agree import Ranks
from ..torch_inside.distributed import is_reducing
from ..torch_inside.names import running_backward
from . import copies, optimizers, parameters
from .agreement import agree
from .loss_scale import LossScale
from .overflows import any_nonfinite

_NOBODY = Ranks()
_numbers = itertools.count()
_known: weakref.WeakKeyDictionary[DistributedDataParallel, Reduction] = weakref.WeakKeyDictionary()


def enter(module: DistributedDataParallel, scale: LossScale | None) -> None:
    """A graph of this scale runs in the forward of this DDP."""
    ddp.check_forward(module)
    reduction = _known.get(module)
    if reduction is None:
        reduction = _known[module] = Reduction(module)
    if scale is not None:
        scale.overflows.leave_to(reduction)
        if reduction.settled and not scale.agreed:
            # Perhaps not all ranks run this graph, so they can't agree any more: each takes 2**16.
            scale.take_start(scale.value)
        if ddp.will_reduce(module):
            reduction.expected.add(scale)
        else:
            reduction.expected.discard(scale)


def before_step(optimizer: Optimizer) -> None:
    """Let ranks agree on what is open, at the first step of an optimizer over a DDP's parameters.
    All ranks must take it.
    """
    if not _known:
        return
    for reduction in [r for r in _known.values() if not r.settled]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not held.isdisjoint(reduction.ids):
            reduction.settle()


def beside(optimizer: Optimizer, scale: LossScale) -> tuple[Ranks, list[torch.Tensor]]:
    """The parameters of an optimizer that graphs of this scale read and no DDP averages, and the
    ranks of the DDPs that average others of its parameters; no ranks if there are none of either.
    """
    if not _known:
        return _NOBODY, []
    groups = optimizer.param_groups
    when = parameters.changes(), len(_known), [len(group["params"]) for group in groups]
    known = optimizers.state_of(optimizer).beside
    if scale not in known or known[scale][0] != when:
        held = [p for group in groups for p in group["params"]]
        ids = {id(p) for p in held}
        averaging = [r for r in _known.values() if not ids.isdisjoint(r.ids)]
        averaged = {key for r in averaging for key in r.ids}
        own = [p for p in held if id(p) not in averaged and scale in parameters.scales_of(p)]
        own = [p for p in own if not hasattr(p, "device_mesh")]  # shards have ranks of their own
        ranks = sum((r.ranks for r in averaging), _NOBODY) if own else _NOBODY
        known[scale] = when, (ranks, own)
    found: tuple[Ranks, list[torch.Tensor]] = known[scale][1]
    return found


class Reduction:
    """What is known of one DDP whose forward has run one of our graphs.

    Attributes:
        ids: the ids of the parameters whose gradients it averages; the DDP keeps these alive.
        ranks: those that average them.
        settled: whether there is nothing that ranks have to agree on.
        number: counts the reductions, in the same order on all ranks.
        expected: the scales of the graphs whose backward is expected to reduce.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        ddp.check(module)
        ddp.hold_group(module)
        self.number = next(_numbers)
        self.settled = False
        self.ranks = Ranks((module.process_group,), module.device)
        self._module = weakref.ref(module)
        self.ids = {id(p) for p in self.parameters()}
        self.expected: weakref.WeakSet[LossScale] = weakref.WeakSet()
        self._running = -1  # the backward that will call `_look`
        parameters.changed()  # `beside` was derived without it
        copies.read_in_full(self.parameters())

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients it averages."""
        module = self._module()
        return [] if module is None else ddp.reduced_parameters(module)

    # -- in a backward ----------------------------------------------------------------------------

    def backward_runs(self) -> None:
        """A graph has run backward: look at the averages when the backward ends."""
        running = running_backward()
        if running != self._running:
            self._running = running
            ddp.after_reduction(self._look)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look(self) -> None:
        self._running = -1
        module = self._module()
        # A checkpoint with use_reentrant=True runs backwards within the backward.
        if module is None or not self.expected or is_reducing(module):
            return
        scales = list(self.expected)
        self.expected.clear()
        gradients = [(p, p.grad) for p in self.parameters() if p.grad is not None]
        for scale in scales:
            own = [g for p, g in gradients if _comes_from(scale, parameters.scales_of(p))]
            scale.overflows.saw_pass(any_nonfinite(own))

    # -- in a step --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Agree with the other ranks. It stays open while a search goes on that none has finished.

        Raises:
            MPCompileError: see `agreement.agree`.
        """
        self.settled = all(agree(self.parameters(), self.ranks))


def _comes_from(scale: LossScale, scales: Sequence[LossScale]) -> bool:
    """Whether an overflow in a parameter of these scales may come out of a graph of `scale`: of
    one that reads it, or of one that hands gradients on to what runs uncompiled before it.
    """
    return scale in scales if scales else scale.open
