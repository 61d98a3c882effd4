"""On what the ranks of DistributedDataParallel (DDP) and of FSDP2 agree.

    a forward under DDP     `enter_ddp`: under which scale one of our graphs runs
    its backward            the gradients are averaged: an overflow on one rank is one on all ranks;
                            at the end of the backward the averages are checked, so all ranks count
                            the same overflows, without a collective
    a graph is compiled     `enter_fsdp`: which groups of FSDP it reads parameters of
    the first step          `before_step`: the ranks agree on the least start of each loss scale
                            that a search of one of them found

Gradients travel, and parameters are gathered, as DDP, FSDP or a communication hook of their user
lets them. What one rank knows doesn't decide whether it takes part in an agreement: its graph may
have been left in FP32, and that of another rank not.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import MPCompileError
from ..ranks import ddp, fsdp
from ..ranks.shards import Ranks, ranks_of
from ..torch_inside.distributed import is_reducing, parameters_of
from ..torch_inside.names import running_backward
from . import copies, parameters
from .loss_scale import LossScale
from .overflows import any_nonfinite

_NOBODY = Ranks()
_numbers = itertools.count()
_ddp: weakref.WeakKeyDictionary[DistributedDataParallel, Reduction] = weakref.WeakKeyDictionary()
# FSDP's groups of parameters (`FSDPParamGroup`) that graphs read -> whether ranks have agreed on
# the starts of their scales, as far as they knew them
_fsdp: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def before_step(optimizer: Optimizer) -> None:
    """Let ranks agree on what is open, at the first step of an optimizer over parameters that a DDP
    averages, or over shards. All ranks must take it.
    """
    reductions = [r for r in _ddp.values() if not r.settled]
    open_ = [group for group, settled in _fsdp.items() if not (settled and _is_agreed(group))]
    if not reductions and not open_:
        return
    held = parameters.parameters_of(optimizer)
    order = {id(p): i for i, p in enumerate(held)}
    for reduction in reductions:
        if not order.keys().isdisjoint(reduction.ids):
            reduction.settle()
    first = {g: min(order.get(id(p), len(held)) for p in _shards_of(g)) for g in open_}
    if shared := [g for g in sorted(open_, key=first.__getitem__) if first[g] < len(held)]:
        _settle(shared)


def only_scale_of(parameter: torch.Tensor) -> LossScale | None:
    """The scale of the graphs that read a parameter, if they have one and the same."""
    scales = parameters.scales_of(parameter)
    return scales[0] if len(scales) == 1 else None


def agree(held: Sequence[torch.Tensor], ranks: Ranks) -> list[bool]:
    """Take the least start that a rank has of each loss scale.

    Args:
        held: parameters, the same on all ranks.

    Returns:
        For each parameter, whether some rank knows the start of its scale, or none searches.

    Raises:
        MPCompileError: a parameter's gradients are scaled on some ranks only.
    """
    scales = [only_scale_of(p) for p in held]
    starts = [math.inf if s is None else s.start for s in scales]
    known = [s is None or not s.fitting or s.search.found for s in scales]
    scaled = [bool(parameters.scales_of(p)) for p in held]
    columns: list[Sequence[float]] = [starts, known, scaled, [not x for x in scaled]]
    numbers = ranks.least([x for column in columns for x in column])
    n = len(held)
    starts, all_know, everywhere, nowhere = (numbers[i * n : (i + 1) * n] for i in range(4))
    for p, all_scaled, none_scaled in zip(held, everywhere, nowhere, strict=True):
        if not (all_scaled or none_scaled):
            raise MPCompileError(
                f"a parameter of shape {tuple(p.shape)} gets scaled gradients on some ranks only. "
                'Others have left a graph in FP32, as a warning says (use loss_scale="none"), or '
                "have not run the compiled model before the first step"
            )
    for scale in {s for s in scales if s is not None}:
        scale.take_start(min(x for x, s in zip(starts, scales, strict=True) if s is scale))
    return [x < math.inf or bool(y) for x, y in zip(starts, all_know, strict=True)]


# -- DistributedDataParallel ----------------------------------------------------------------------


def enter_ddp(module: DistributedDataParallel, scale: LossScale | None) -> None:
    """A graph of this scale runs in the forward of this DDP."""
    ddp.check_forward(module)
    reduction = _ddp.get(module)
    if reduction is None:
        reduction = _ddp[module] = Reduction(module)
    if scale is not None:
        scale.overflows.leave_to(reduction)
        if reduction.settled and not scale.agreed:
            # Perhaps not all ranks run this graph, so they can't agree any more: each takes 2**16.
            scale.take_start(scale.value)
        if module.require_backward_grad_sync:  # not under `no_sync`
            reduction.expected.add(scale)
        else:
            reduction.expected.discard(scale)


def beside(optimizer: Optimizer, scale: LossScale) -> tuple[Ranks, list[torch.Tensor]]:
    """The parameters of an optimizer that graphs of this scale read and no DDP averages, and the
    ranks of the DDPs that average others of its parameters; no ranks if there are none of either.
    """
    if not _ddp:
        return _NOBODY, []
    held = parameters.parameters_of(optimizer)
    averaging = [r for r in _ddp.values() if not r.ids.isdisjoint(map(id, held))]
    averaged = {key for r in averaging for key in r.ids}
    own = [p for p in held if id(p) not in averaged and scale in parameters.scales_of(p)]
    own = [p for p in own if not hasattr(p, "device_mesh")]  # shards have ranks of their own
    return sum((r.ranks for r in averaging), _NOBODY) if own else _NOBODY, own


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
        copies.read_in_full(self.parameters())

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients it averages."""
        module = self._module()
        return [] if module is None else [p for p in parameters_of(module) if p.requires_grad]

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


# -- FSDP2 ----------------------------------------------------------------------------------------


def enter_fsdp(inputs: Iterable[Any]) -> bool:
    """A graph was compiled for these inputs of the caller's. Returns whether FSDP has gathered
    parameters among them.
    """
    shards = fsdp.shards_of(x for x in inputs if isinstance(x, torch.nn.Parameter))
    for shard in shards:
        _fsdp.setdefault(shard.group, False)
    return bool(shards)


def _shards_of(group: Any) -> list[torch.Tensor]:
    """What an optimizer holds of the parameters of a group."""
    return [holder.sharded_param for holder in group.fsdp_params]


def _is_agreed(group: Any) -> bool:
    """Whether there is nothing that ranks have to agree on again."""
    return all(scale is None or scale.agreed for scale in map(only_scale_of, _shards_of(group)))


def _settle(groups: Sequence[Any]) -> None:
    """Agree with the other ranks. It stays open while a search goes on that no rank finished.

    Raises:
        MPCompileError: see `agreement.agree`.
    """
    held = [shard for group in groups for shard in _shards_of(group)]
    found = iter(agree(held, ranks_of(held)))
    for group in groups:
        known = [next(found) for _ in _shards_of(group)]
        _fsdp[group] = all(known)
