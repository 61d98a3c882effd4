"""Streams and events: one stream, and events that happen some kernels after they were recorded."""

from __future__ import annotations

import time
from typing import Any

import torch

from .library import LIBRARY

__all__ = ["LAG", "Event", "Stream", "synchronize"]

LAG = 30
"""Kernels by which the device is behind the host: an event has happened when so many more were
asked for. A GPU in a training step is behind by more than that.
"""

_EVER = 2**62


def synchronize(device: Any = None) -> None:
    """Wait until the device has done all of its work."""
    LIBRARY.emucuda_arrive(_EVER)


class Event:
    """A moment in the device's work.

    Attributes:
        asked: how often one was made, recorded, or asked whether it has happened.
    """

    asked = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Event.asked += 1
        self._recorded: int | None = None
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        Event.asked += 1
        self._recorded, self._time = LIBRARY.emucuda_now(), time.perf_counter()

    def query(self) -> bool:
        """Whether it has happened. A host that does nothing but ask gets there, too."""
        Event.asked += 1
        if self._recorded is None or LIBRARY.emucuda_now() >= self._recorded + LAG:
            self.synchronize()
            return True
        LIBRARY.emucuda_tick()
        return False

    def synchronize(self) -> None:
        if self._recorded is not None:
            LIBRARY.emucuda_arrive(self._recorded)

    def wait(self, stream: Any = None) -> None:
        """Nothing to do: all work is done in one order."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host, which say nothing of a GPU."""
        return 1000 * (end._time - self._time)


class Stream:
    """The one stream, whoever makes it."""

    device_index = stream_id = cuda_stream = priority = 0
    device_type = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        """Nothing to do: all work is done in one order."""

    def wait_event(self, event: Event) -> None:
        """Nothing to do: all work is done in one order."""

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        synchronize()
