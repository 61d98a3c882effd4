"""What DistributedDataParallel (DDP) averages over ranks: how it travels, and what is read off it.

    a forward under DDP     `enter`: which of its parameters our graphs read, and under which scale
    its backward            the gradients are averaged: an overflow on one rank is one on all ranks;
                            at the end of the backward the averages are checked, so all ranks count
                            the same overflows, without a collective
    the first backward      the ranks agree on which parameters all of them may send in the low
                            dtype, if no loss scale is being searched for: where it is given, or
                            was loaded, every reduction is like the later ones
    the first step          else they agree here, also on the least start of each loss scale that a
                            search of one of them found

A bucket travels in the low dtype if all ranks have agreed on it for each of its parameters: graphs
read all of them, in FP16 under one and the same loss scale. Gradients that no graph has scaled may
not fit FP16, however low the scale: one of them keeps its bucket in FP32.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..ranks import ddp
from ..ranks.agree import Ranks
from ..torch_inside.autograd import running_backward
from ..torch_inside.distributed import is_reducing
from . import copies, optimizers, parameters
from .agreement import Wishes, agree
from .loss_scale import LossScale
from .overflows import any_nonfinite, weakly

_NOBODY = Ranks()
_numbers = itertools.count()
_known: weakref.WeakKeyDictionary[DistributedDataParallel, Reduction] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Low:
    """How the gradient of a parameter may travel.

    Attributes:
        dtype: FP16 or BF16.
        scale: of the graphs that make it, in FP16; None in BF16, which has FP32's range.
    """

    dtype: torch.dtype
    scale: LossScale | None

    def multiplier(self, device: torch.device) -> torch.Tensor | float | None:
        """What it is multiplied by: 1, or 0-d FP32 on `device`; None while ranks have not agreed on
        the scale (it was loaded), so that it must travel in FP32.
        """
        if self.scale is None:
            return 1.0
        return self.scale.live.tensor(device, shared=False) if self.scale.agreed else None


def gradients_in(low: torch.dtype | None, scale: LossScale | None) -> Low | None:
    """How gradients may travel that a graph of this scale makes, if they are to in `low`. Without a
    scale they might overflow FP16.
    """
    if low is torch.float16:
        return None if scale is None else Low(low, scale)
    return None if low is None else Low(low, None)


def enter(
    module: DistributedDataParallel,
    trained: Iterable[torch.Tensor],
    low: Low | None,
    scale: LossScale | None,
    *,
    hooked: bool,
) -> None:
    """A graph runs in the forward of this DDP.

    Args:
        trained: the leaves whose gradients the graph makes.
        low: how these may travel; None: in FP32.
        hooked: whether this program wants gradients to travel low, also if this graph's do not:
            the ranks must all have the hook in which they agree, whatever their graphs came to.
    """
    ddp.check_forward(module)
    reduction = _known.get(module)
    if reduction is None:
        reduction = _known[module] = Reduction(module)
    reduction.read(trained, low)
    if hooked:
        reduction.hook()
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
        self._read = Wishes()  # how the gradients of parameters may travel
        self._agreed: dict[int, Low] = {}  # those that all ranks may send low
        self.expected: weakref.WeakSet[LossScale] = weakref.WeakSet()
        self._running = -1  # the backward that will call `_look`
        self._hooked = False
        parameters.changed()  # `beside` was derived without it
        copies.read_in_full(self.parameters())

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients it averages."""
        module = self._module()
        return [] if module is None else ddp.reduced_parameters(module)

    # -- in a forward -----------------------------------------------------------------------------

    def read(self, trained: Iterable[torch.Tensor], low: Low | None) -> None:
        """A graph reads these parameters, and lets their gradients travel so."""
        for parameter in trained:
            if id(parameter) in self.ids:
                self._read.add(parameter, low)

    def hook(self) -> None:
        if not self._hooked:
            self._hooked = True
            module = self._module()
            assert module is not None
            ddp.reduce_by(module, weakly(self.chosen))

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

    def chosen(self, bucket: Sequence[torch.Tensor], first: bool) -> ddp.Wire | None:
        """How a bucket of these parameters travels; None: as it is. Before the first bucket of a
        backward the ranks agree on what is open.
        """
        if first and not self.settled:
            self.settle(in_backward=True)
        lows = {self._agreed.get(id(p)) for p in bucket}
        low = lows.pop() if len(lows) == 1 else None
        multiplier = None if low is None else low.multiplier(bucket[0].device)
        return None if low is None or multiplier is None else ddp.Wire(low.dtype, multiplier)

    # -- in a step --------------------------------------------------------------------------------

    def settle(self, *, in_backward: bool = False) -> None:
        """Agree with the other ranks. It stays open while a search goes on that none has finished,
        and in a backward that may change a scale.

        Raises:
            MPCompileError: see `agreement.agree`.
        """
        held = self.parameters()
        agreed = agree(held, [self._read.of(held)], self.ranks, in_backward=in_backward)
        if agreed is not None:
            (sent,), found = agreed
            lows = zip(held, self._read.common(held, sent), strict=True)
            self._agreed = {id(p): low for p, low in lows if low is not None}
            self.settled = all(found)


def _comes_from(scale: LossScale, scales: Sequence[LossScale]) -> bool:
    """Whether an overflow in a parameter of these scales may come out of a graph of `scale`: of
    one that reads it, or of one that hands gradients on to what runs uncompiled before it.
    """
    return scale in scales if scales else scale.open
