"""What a process sends through gloo, counted from the profiler's events.

Whatever sends something (DDP's reducer in C++, FSDP's all-gathers, DTensor's functional
collectives, a user's own call) goes through an operator `c10d::...`, which names the collective,
and makes gloo send, which leaves an event `gloo:...` with the size and the dtype. The profiler
records both, on all threads, and changes nothing. If the two lists don't match, or hold something
that has no line below, that is an error: nothing goes by uncounted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["Collective", "Sent", "sent_in"]


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    """One collective.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "broadcast" or "barrier".
        dtype: of what was sent, as in "FP16".
        bytes: that each rank sends where the ranks form a ring, as NCCL's do for large messages.
    """

    kind: str
    dtype: str
    bytes: float


class Sent(list[Collective]):
    """The collectives of one process, in the order in which they began."""


# Operator -> what it is, gloo's name for what it does then, and how many times a rank sends the
# tensor that gloo's event shows, for n ranks in a ring. The tensor is the whole one, but a shard
# for an all-gather. (Read in torch 2.13: gloo has no reduce-scatter of its own.)
_Times = Callable[[int], float]
_KINDS: dict[str, tuple[str, str, _Times]] = {
    "c10d::allreduce_": ("all-reduce", "gloo:all_reduce", lambda n: 2 * (n - 1) / n),
    "c10d::allgather_": ("all-gather", "gloo:all_gather", lambda n: n - 1),
    "c10d::_allgather_base_": ("all-gather", "gloo:all_gather", lambda n: n - 1),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", "gloo:all_reduce", lambda n: (n - 1) / n),
    "c10d::broadcast_": ("broadcast", "gloo:broadcast", lambda n: 1),
    "c10d::barrier": ("barrier", "gloo:barrier", lambda n: 0),
}

_DTYPES = {
    "float": ("FP32", 4), "c10::Half": ("FP16", 2), "c10::BFloat16": ("BF16", 2),
    "double": ("FP64", 8), "int": ("int32", 4), "long int": ("int64", 8),
    "unsigned char": ("uint8", 1),
}  # fmt: skip


@contextlib.contextmanager
def sent_in(ranks: int) -> Iterator[Sent]:
    """Everything that this process, one of `ranks`, sends inside; the list is filled at the end.

    Raises:
        RuntimeError: something was sent that is not understood.
    """
    sent = Sent()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield sent
        # Gloo's thread ends its event after those that wait for it go on.
        time.sleep(0.2)
    assert profiler.profiler is not None
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    asked = [e.name() for e in events if e.name().startswith("c10d::")]
    done = [e for e in events if e.name().startswith("gloo:")]
    names = [e.name() for e in done]
    if any(name not in _KINDS for name in asked) or [_KINDS[a][1] for a in asked] != names:
        raise RuntimeError(f"can't tell what was sent: asked for {asked}, gloo did {names}")
    sent.extend(_collective(a, event, ranks) for a, event in zip(asked, done, strict=True))


def _collective(operator: str, event: Any, ranks: int) -> Collective:
    kind, _, times = _KINDS[operator]
    if kind == "barrier":
        return Collective(kind, "", 0)
    dtype, size = _DTYPES[event.dtypes()[0]]
    return Collective(kind, dtype, times(ranks) * size * math.prod(event.shapes()[0]))
