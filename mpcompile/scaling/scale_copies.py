"""Copies of the scale for forwards, each in memory that stays as it is while anybody holds it.

A backward divides by the number that its forward multiplied by, so each forward gets a copy of a
scale that a step moves in place. Memory of its own for each copy would lie elsewhere in each step,
as the allocator pleases; and a CUDA graph, which has the addresses of what a backward saved, would
be recorded anew. So a copy goes into the first of a few places that nobody else holds. A training
loop asks in the same order in each step, and gets the same addresses.

Whether a place is free is asked of its memory: a forward that saved the copy, or any view of it,
holds the memory and is counted. Work that the device has yet to do for those that held it is in
front of the next copy on the same stream; so each stream has places of its own, as it has in
torch's allocator.
"""

from __future__ import annotations

import threading

import torch

from ..devices.registry import capabilities
from ..torch_inside.tensors import holders

# More forwards than these that wait for their backward at once get memory of their own.
_PLACES = 8


class ScaleCopies:
    """Copies of one 0-d tensor, for forwards."""

    def __init__(self) -> None:
        self._places: dict[object, list[_Place]] = {}  # by stream
        self._taking = threading.Lock()  # two threads must not find the same place free

    def of(self, scale: torch.Tensor) -> torch.Tensor:
        """A copy of the scale as it is now, which nothing writes to as long as it is held."""
        places = self._places.setdefault(capabilities(scale.device).stream(), [])
        with self._taking:
            for place in places:
                if place.is_free():
                    return place.take(scale)
            if len(places) == _PLACES:
                return scale.clone()
            places.append(_Place(scale))
            return places[-1].take(scale)


class _Place:
    """Memory for one copy."""

    def __init__(self, like: torch.Tensor) -> None:
        self._tensor = torch.empty_like(like)
        self._memory = self._tensor.untyped_storage()
        self._alone = holders(self._memory)

    def is_free(self) -> bool:
        return holders(self._memory) == self._alone

    def take(self, scale: torch.Tensor) -> torch.Tensor:
        # Its holders are seen because what they get is another tensor. It shares the version
        # counter: were it written to while it is saved, autograd would refuse to go backward.
        return self._tensor.copy_(scale).detach()
