"""What FSDP2 gathers and reduces: in which dtype it travels, and on what its ranks agree.

    a graph is compiled   `enter`: which parameters of FSDP it reads, whether it does no more than
                          cast them to the low dtype, and under which scale it makes gradients
    the first backward    where all ranks have the same scale (none searches for its start), they
                          agree on what all of them may send in the low dtype
    the first step        the ranks agree on what is still open: on the least start of each loss
                          scale that a search of one of them found, and on what they may send

A parameter is gathered in the low dtype if the graphs of all ranks do no more than cast it: then
they compute exactly what they would have. (A graph compiled later that reads it in FP32 reads it
rounded, and so does code that is not compiled.) The gradients of an FSDP group are reduced in the
low dtype if graphs make all of them, in FP16 under one and the same scale.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from .. import ir
from ..ranks import fsdp
from ..ranks.shards import ranks_of
from .agreement import Wishes, agree, only_scale_of
from .loss_scale import LossScale
from .overflows import weakly
from .reductions import gradients_in

# FSDP's group of parameters (`FSDPParamGroup`) -> what is known of it
_known: weakref.WeakKeyDictionary[Any, Sharding] = weakref.WeakKeyDictionary()


def enter(
    captured: fx.GraphModule,
    inputs: Sequence[Any],
    low: torch.dtype | None,
    scale: LossScale | None,
    *,
    hooked: bool,
) -> bool:
    """A graph was compiled. Returns whether it reads parameters that FSDP has gathered.

    Args:
        captured: the rewritten graph; or the one that was left in FP32.
        inputs: the caller's inputs, which come first among the graph's.
        low: the dtype in which parameters and gradients may travel; None: FP32.
        hooked: whether this program wants gradients to travel low, also if this graph's do not: all
            ranks must ask each other in the same places, whatever their graphs came to.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")[: len(inputs)]
    pairs = zip(inputs, placeholders, strict=True)
    read = {id(x): (x, node) for x, node in pairs if isinstance(x, torch.nn.Parameter)}
    shards = fsdp.shards_of(parameter for parameter, _ in read.values())
    for shard in shards:
        sharding = _known.get(shard.group)
        if sharding is None:
            sharding = _known[shard.group] = Sharding(shard.group)
        sharding.hooked |= hooked
        _, node = read[id(shard.whole)]
        casts = low is not None and ir.reads_only_low(node, low)
        sharding.gathers.add(shard.holder, low if casts else None)
        if torch.is_grad_enabled():
            sharding.reduces.add(shard.holder, gradients_in(low, scale))
    return bool(shards)


def before_step(optimizer: Optimizer) -> None:
    """Let ranks agree on what is open, at the first step of an optimizer over shards. All ranks
    must take it.
    """
    if not _known:
        return
    open_ = [sharding for sharding in _known.values() if sharding.is_open()]
    if open_:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        order = {id(p): i for i, p in enumerate(held)}
        first = {s: min(order.get(id(p), len(held)) for p in s.shards()) for s in open_}
        _settle([s for s in sorted(open_, key=first.__getitem__) if first[s] < len(held)])


class Sharding:
    """What is known of one FSDP group whose parameters a graph reads.

    Attributes:
        hooked: whether ranks agree in a backward, if they can.
        gathers, reduces: how graphs let each parameter, and its gradient, travel; by FSDP's records
            of the parameters.
    """

    def __init__(self, group: Any) -> None:
        self.hooked = False
        self._group = weakref.ref(group)
        self.gathers, self.reduces = Wishes(), Wishes()
        self._settled = False
        self._wire().before_reducing = weakly(self.settle_in_backward)

    def holders(self) -> list[Any]:
        group = self._group()
        return [] if group is None else list(group.fsdp_params)

    def shards(self) -> list[torch.Tensor]:
        """What an optimizer holds of them."""
        return [holder.sharded_param for holder in self.holders()]

    def is_open(self) -> bool:
        """Whether there is something that ranks have to agree on."""
        return not self._settled or not all(
            scale.agreed for shard in self.shards() if (scale := only_scale_of(shard)) is not None
        )

    def settle(self, gathers: Sequence[bool], reduces: Sequence[bool], *, final: bool) -> None:
        self._settled = final
        wire, holders = self._wire(), self.holders()
        dtypes = zip(holders, self.gathers.common(holders, gathers), strict=True)
        wire.gathered.update({id(holder): dtype for holder, dtype in dtypes if dtype is not None})
        reduced = zip(holders, self.reduces.common(holders, reduces), strict=True)
        lows = {low for holder, low in reduced if holder.sharded_param.requires_grad}
        low = lows.pop() if len(lows) == 1 else None
        if low is not None:
            wire.reduced, wire.scale = low.dtype, low.multiplier

    def settle_in_backward(self) -> None:
        """Agree on what is open, if no scale may change by it."""
        if self.hooked and self.is_open():
            _settle([self], in_backward=True)

    def _wire(self) -> Any:
        from ..ranks.fsdp_wire import wire_of  # only a torch with distributed has it

        return wire_of(self._group())


def _settle(shardings: Sequence[Sharding], *, in_backward: bool = False) -> None:
    """Agree with the other ranks. It stays open while a search goes on that no rank finished, and
    in a backward that may change a scale.

    Raises:
        MPCompileError: see `agreement.agree`.
    """
    held = [shard for sharding in shardings for shard in sharding.shards()]
    gathers = [x for sharding in shardings for x in sharding.gathers.of(sharding.holders())]
    reduces = [x for sharding in shardings for x in sharding.reduces.of(sharding.holders())]
    agreed = agree(held, [gathers, reduces], ranks_of(held), in_backward=in_backward)
    if agreed is None:
        return
    (gathers, reduces), found = agreed
    at = 0
    for sharding in shardings:
        part = slice(at, at := at + len(sharding.shards()))
        sharding.settle(gathers[part], reduces[part], final=all(found[part]))
