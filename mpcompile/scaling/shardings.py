"""On what the ranks of FSDP2 agree.

    a graph is compiled   `enter`: which groups of FSDP it reads parameters of
    the first step        `before_step`: the ranks agree on the least start of each loss scale that
                          a search of one of them found

FSDP gathers parameters and reduces gradients as its user told it to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..ranks import fsdp
from ..ranks.shards import ranks_of
from .agreement import agree, only_scale_of

# FSDP's group of parameters (`FSDPParamGroup`) -> what is known of it
_known: weakref.WeakKeyDictionary[Any, Sharding] = weakref.WeakKeyDictionary()


def enter(inputs: Iterable[Any]) -> bool:
    """A graph was compiled for these inputs of the caller's. Returns whether FSDP has gathered
    parameters among them.
    """
    shards = fsdp.shards_of(x for x in inputs if isinstance(x, torch.nn.Parameter))
    for shard in shards:
        if shard.group not in _known:
            _known[shard.group] = Sharding(shard.group)
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
        settled: whether ranks have agreed on the starts of its scales, as far as they knew them.
    """

    def __init__(self, group: Any) -> None:
        self.settled = False
        self._group = weakref.ref(group)

    def shards(self) -> list[torch.Tensor]:
        """What an optimizer holds of its parameters."""
        group = self._group()
        return [] if group is None else [holder.sharded_param for holder in group.fsdp_params]

    def is_open(self) -> bool:
        """Whether there is something that ranks have to agree on."""
        return not self.settled or not all(
            scale.agreed for shard in self.shards() if (scale := only_scale_of(shard)) is not None
        )


def _settle(shardings: Sequence[Sharding]) -> None:
    """Agree with the other ranks. It stays open while a search goes on that no rank finished.

    Raises:
        MPCompileError: see `agreement.agree`.
    """
    held = [shard for sharding in shardings for shard in sharding.shards()]
    found = iter(agree(held, ranks_of(held)))
    for sharding in shardings:
        known = [next(found) for _ in sharding.shards()]
        sharding.settled = all(known)
