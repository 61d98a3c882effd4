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

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from .. import ir
from ..errors import MPCompileError
from ..ranks import agree, fsdp
from . import parameters
from .loss_scale import LossScale
from .reductions import Low, gradients_in

# FSDP's group of parameters (`FSDPParamGroup`) -> what is known of it
_known: weakref.WeakKeyDictionary[Any, Sharding] = weakref.WeakKeyDictionary()


def enter(
    captured: fx.GraphModule,
    inputs: Sequence[Any],
    low: torch.dtype | None,
    scale: LossScale | None,
    *,
    hooked: bool,
) -> None:
    """A graph was compiled.

    Args:
        captured: the rewritten graph; or the one that was left in FP32.
        inputs: the caller's inputs, which come first among the graph's.
        low: the dtype in which parameters and gradients may travel; None: FP32.
        scale: the graph's loss scale; None where it is not scaled.
        hooked: whether this program wants gradients to travel low, also if this graph's do not: all
            ranks must ask each other in the same places, whatever their graphs came to.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")[: len(inputs)]
    pairs = zip(inputs, placeholders, strict=True)
    read = {id(x): (x, node) for x, node in pairs if isinstance(x, torch.nn.Parameter)}
    for shard in fsdp.shards_of(parameter for parameter, _ in read.values()):
        sharding = _known.get(shard.group)
        if sharding is None:
            sharding = _known[shard.group] = Sharding(shard.group)
        sharding.hooked |= hooked
        _, node = read[id(shard.whole)]
        casts = low is not None and ir.reads_only_low(node, low)
        sharding.is_read(shard.holder, low if casts else None)
        if torch.is_grad_enabled():
            sharding.is_trained(shard.holder, gradients_in(low, scale))


def before_step(optimizer: Optimizer) -> None:
    """Let ranks agree on what is open, at the first step of an optimizer over shards. All ranks
    must take it.
    """
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
    """

    def __init__(self, group: Any) -> None:
        self.hooked = False
        self._group = weakref.ref(group)
        # By the id of a holder: how graphs let its parameter and its gradient travel (None: FP32).
        self._gathers: dict[int, torch.dtype | None] = {}
        self._reduces: dict[int, Low | None] = {}
        self._settled = False
        self._wire().before_reducing = _settling(weakref.ref(self))

    def holders(self) -> list[Any]:
        """FSDP's records of the group's parameters."""
        group = self._group()
        return [] if group is None else list(group.fsdp_params)

    def shards(self) -> list[torch.Tensor]:
        """What an optimizer holds of them."""
        return [holder.sharded_param for holder in self.holders()]

    def is_open(self) -> bool:
        """Whether there is something that ranks have to agree on."""
        return not self._settled or any(s is not None and not s.agreed for s in self.scales())

    def scales(self) -> list[LossScale | None]:
        """The scale of the graphs that read each parameter, or None."""
        return [_one(parameters.scales_of(shard)) for shard in self.shards()]

    def is_read(self, holder: Any, low: torch.dtype | None) -> None:
        """A graph reads this parameter; only cast to `low`, if that is not None."""
        if self._gathers.setdefault(id(holder), low) is not low:
            self._gathers[id(holder)] = None  # another graph reads it otherwise

    def is_trained(self, holder: Any, low: Low | None) -> None:
        """A graph makes a gradient of this parameter, which may travel so."""
        if self._reduces.setdefault(id(holder), low) != low:
            self._reduces[id(holder)] = None  # another graph makes a part of the gradient

    def wishes(self) -> tuple[list[float], list[float]]:
        """For each parameter, as numbers: whether to gather it low, and to reduce its gradient."""
        gathers = [float(self._gathers.get(id(h)) is not None) for h in self.holders()]
        reduces = [float(self._reduces.get(id(h)) is not None) for h in self.holders()]
        return gathers, reduces

    def settle(self, gathers: Sequence[float], reduces: Sequence[float], *, final: bool) -> None:
        """Take what all ranks can do."""
        self._settled = final
        wire, holders = self._wire(), self.holders()
        for holder, gathered in zip(holders, gathers, strict=True):
            dtype = self._gathers.get(id(holder))
            if gathered and dtype is not None:
                wire.gathered[id(holder)] = dtype
        lows = {
            self._reduces.get(id(holder)) if reduced else None
            for holder, reduced in zip(holders, reduces, strict=True)
            if holder.sharded_param.requires_grad
        }
        low = lows.pop() if len(lows) == 1 else None
        if low is not None:
            wire.reduced, wire.scale = low.dtype, low.multiplier

    def settle_where_alike(self) -> None:
        """Agree in a backward, if all ranks have the same scale and none searches for its start."""
        gathers, reduces = self.wishes()
        if not (self.hooked and self.is_open()):
            return
        scales = self.scales()
        # What a search has found may become less until its backward ends.
        starts = [0.0 if s is None else math.inf if s.fitting else s.start for s in scales]
        negative = [-start for start in starts]
        least, negative, gathers, reduces = _least([self], starts, negative, gathers, reduces)
        if all(x == -y < math.inf for x, y in zip(least, negative, strict=True)):
            for scale, value in zip(scales, least, strict=True):
                if scale is not None:
                    scale.take_start(value)
            self.settle(gathers, reduces, final=True)

    def _wire(self) -> Any:
        from ..ranks.fsdp_wire import wire_of  # only a torch with distributed has it

        return wire_of(self._group())


def _settle(shardings: Sequence[Sharding]) -> None:
    """Agree with the other ranks. It stays open while a search goes on that no rank finished.

    Raises:
        MPCompileError: a graph is scaled on some ranks only, which would not check the same steps.
    """
    scales = [scale for sharding in shardings for scale in sharding.scales()]
    wishes = [sharding.wishes() for sharding in shardings]
    starts = [math.inf if s is None else s.start for s in scales]
    idle = [float(s is None or s.start < math.inf) for s in scales]
    gathers, reduces = ([x for wish in wishes for x in wish[side]] for side in (0, 1))
    scaled = [float(s is not None) for s in scales]
    not_scaled = [1 - x for x in scaled]
    columns = starts, idle, gathers, reduces, scaled, not_scaled
    starts, idle, gathers, reduces, everywhere, nowhere = _least(shardings, *columns)
    if not all(x or y for x, y in zip(everywhere, nowhere, strict=True)):
        raise MPCompileError(
            "a graph of this FSDP model was left in FP32 on some of the ranks, and rewritten on "
            "others: they would not skip the same steps. The warning of the former gives the "
            'reason; loss_scale="none" or dtype=torch.bfloat16 needs no agreement'
        )
    for scale in {s for s in scales if s is not None}:
        scale.take_start(min(x for x, s in zip(starts, scales, strict=True) if s is scale))
    at = 0
    for sharding in shardings:
        part = slice(at, at := at + len(sharding.shards()))
        found = all(x < math.inf or y for x, y in zip(starts[part], idle[part], strict=True))
        sharding.settle(gathers[part], reduces[part], final=found)


def _least(shardings: Sequence[Sharding], *columns: Sequence[float]) -> list[list[float]]:
    """The least on all ranks of each number; a column has one for each parameter."""
    shards = [shard for sharding in shardings for shard in sharding.shards()]
    ranks, n = fsdp.ranks_of(shards), len(shards)
    numbers = agree.least([x for column in columns for x in column], ranks.groups, ranks.device)
    return [numbers[i * n : (i + 1) * n] for i in range(len(columns))]


def _settling(sharding: weakref.ref[Sharding]) -> Callable[[], None]:
    """`settle_where_alike` for what must not keep it alive."""

    def settle() -> None:
        alive = sharding()
        if alive is not None:
            alive.settle_where_alike()

    return settle


def _one(scales: Sequence[LossScale]) -> LossScale | None:
    """The scale of a parameter that the graphs of only one scale read."""
    return scales[0] if len(scales) == 1 else None
