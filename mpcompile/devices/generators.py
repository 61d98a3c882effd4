"""The random states of the host and of devices: saved and restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from .registry import capabilities, is_supported

__all__ = ["RandomState", "unchanged"]


class RandomState:
    """The states of the host's and some devices' generators at the time this is made.

    Devices of an unsupported type are left out: mpcompile draws no random numbers there.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        used = dict.fromkeys((torch.device("cpu"), *filter(is_supported, devices)))
        self._states = [(one, one.random_state()) for one in map(capabilities, used)]

    def restore(self) -> None:
        """Restore all of these states."""
        for one, state in self._states:
            one.set_random_state(state)


@contextmanager
def unchanged(devices: Iterable[torch.device]) -> Iterator[None]:
    """A context that leaves the random states of the host and the devices unchanged."""
    before = RandomState(devices)
    try:
        yield
    finally:
        before.restore()
