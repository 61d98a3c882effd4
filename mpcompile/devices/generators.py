"""The random numbers of the host and of devices: noted, and drawn again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from .registry import capabilities, is_supported

__all__ = ["RandomState", "unchanged"]


class RandomState:
    """The states of the host's generator and of those of some devices, when this is made.

    Devices of a type that is not supported are passed over: nothing of ours draws there.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        used = dict.fromkeys((torch.device("cpu"), *filter(is_supported, devices)))
        self._states = [(one, one.random_state()) for one in map(capabilities, used)]

    def restore(self) -> None:
        """Put all of them back."""
        for one, state in self._states:
            one.set_random_state(state)


@contextmanager
def unchanged(devices: Iterable[torch.device]) -> Iterator[None]:
    """What is drawn inside leaves the random numbers of the host and the devices as they were."""
    before = RandomState(devices)
    try:
        yield
    finally:
        before.restore()
