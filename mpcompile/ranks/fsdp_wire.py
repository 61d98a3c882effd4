"""FSDP2's collectives in the low dtype: parameters are gathered, and gradients reduced, in half of
the bytes.

    all-gather       [W shard, FP32 | b shard, FP32] -> [b, FP32 | W, low] -> gathered -> FP32
    reduce-scatter   gradients, FP32 -> times scale / ranks, low -> summed -> FP32, divided again

They stand in for FSDP's own (`set_custom_all_gather`, `set_custom_reduce_scatter`), which see one
flat FP32 tensor for a group of parameters, and give back FP32. What is gathered low is rounded to
the low dtype, so only parameters that graphs cast to it are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..torch_inside.distributed import (
    DefaultAllGather,
    DefaultReduceScatter,
    comms_of,
    set_all_gather,
    set_reduce_scatter,
    shard_of,
)
from ..torch_inside.tensors import copy_all


@dataclass
class Wire:
    """How the parameters of one FSDP group travel; the same on all of its ranks.

    Attributes:
        group: FSDP's `FSDPParamGroup`.
        gathered: ids of the parameters (`FSDPParam`) that are gathered in the low dtype, and it.
        reduced: the low dtype of the gradients, or None: they travel in FP32.
        scale: what to multiply gradients by, 0-d FP32 on a device; 1 in BF16; None: not known to
            all ranks, so that they travel in FP32.
        before_reducing: called before gradients are reduced, by all ranks, which may agree in it
            on how they travel.
    """

    group: Any
    gathered: dict[int, torch.dtype] = field(default_factory=dict)
    reduced: torch.dtype | None = None
    scale: Callable[[torch.device], torch.Tensor | float | None] = lambda device: None
    before_reducing: Callable[[], None] = lambda: None


def wire_of(group: Any) -> Wire:
    """How this group travels, for the caller to change. The group uses it where it communicates in
    torch's own way so far: a user's own (`set_custom_all_gather`) stays, and carries FP32.
    """
    gather, reduce = comms_of(group)
    for comm in (gather, reduce):
        if isinstance(comm, (_LowAllGather, _LowReduceScatter)):
            return comm.wire
    wire = Wire(group)
    if type(gather) is DefaultAllGather:
        set_all_gather(group, _LowAllGather(wire))
    if type(reduce) is DefaultReduceScatter:
        set_reduce_scatter(group, _LowReduceScatter(wire))
    return wire


class _LowAllGather(DefaultAllGather):
    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        sizes, lows = self._layout()
        fits = input_tensor.dtype is torch.float32 and sum(sizes) == input_tensor.numel()
        if not fits or not any(lows):
            return super().__call__(output_tensor, input_tensor, group, async_op)
        ranks, rank = group.size(), group.rank()
        packed, parts = self._packed(sizes, lows, ranks, input_tensor.device)
        copy_all([part[rank] for part in parts], list(input_tensor.split(sizes)))
        # Its end is awaited here, as the result is widened: on a GPU by the stream, not the host.
        super().__call__(packed.view(-1), packed[rank], group)
        whole = list(output_tensor.view(ranks, -1).split(sizes, dim=1))
        copy_all(whole, parts)
        return None

    def _layout(self) -> tuple[list[int], list[torch.dtype | None]]:
        """The number of elements of each parameter's shard, and the low dtype that it travels in
        (None: FP32), in the order in which FSDP concatenates them.
        """
        holders = self.wire.group.fsdp_params
        shards = map(shard_of, holders)
        return [s.numel() for s in shards], [self.wire.gathered.get(id(h)) for h in holders]

    def _packed(
        self,
        sizes: Sequence[int],
        lows: Sequence[torch.dtype | None],
        ranks: int,
        device: torch.device,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Bytes to be gathered, (ranks, bytes of one), and each parameter's part of them as a view
        in its dtype, (ranks, elements). FP32 comes first, so that all parts are aligned.
        """
        widths = [4 if low is None else low.itemsize for low in lows]
        order = sorted(range(len(sizes)), key=lambda i: -widths[i])
        total = sum(size * width for size, width in zip(sizes, widths, strict=True))
        row = -(-total // 4) * 4
        packed = self.allocate((ranks * row,), dtype=torch.uint8, device=device).view(ranks, row)
        parts: dict[int, torch.Tensor] = {}
        at = 0
        for i in order:
            end = at + sizes[i] * widths[i]
            parts[i] = packed[:, at:end].view(lows[i] or torch.float32)
            at = end
        return packed, [parts[i] for i in range(len(sizes))]


class _LowReduceScatter(DefaultReduceScatter):
    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self.wire.before_reducing()
        return self._reduce(output_tensor, input_tensor, *args, **kwargs)

    def _reduce(
        self, result: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Any
    ) -> Any:
        low, scale = self.wire.reduced, self.wire.scale(given.device)
        if low is None or scale is None or given.dtype is not torch.float32:
            return super().__call__(result, given, group, op)
        ranks = group.size()
        mine = self.allocate(given.size(), dtype=low, device=given.device)
        summed = self.allocate(result.size(), dtype=low, device=given.device)
        torch.mul(given, scale / ranks, out=mine)  # so that no sum overflows
        done = super().__call__(summed, mine, group, dist.ReduceOp.SUM)
        result.copy_(summed).mul_(ranks * self._factor(op, ranks) / scale)
        return done

    def _factor(self, op: Any, ranks: int) -> float:
        """What the operation multiplies the sum over ranks by."""
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return 1.0 / ranks
        return 1.0 / float(self.wire.group.gradient_divide_factor)  # PREMUL_SUM
