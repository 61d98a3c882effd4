"""The autocast region of the model's own that a whole graph stands in.

A region that a graph enters and leaves is read off the graph (`replay.py`). But where the graph
breaks below the function that opened the region, Python enters it, and what runs in it is compiled
function by function: none of these graphs names the region.

Torch counts how deep regions are nested. Those that are deeper than the compiled call are the
model's own; those of its caller change nothing. Two things this can't tell. The count knows no
device, so a region for another one than the graph's counts as well. And Dynamo doesn't guard on
it: a function that runs in such a region and elsewhere keeps the graphs that it got first.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch


class _RegionThread(threading.local):
    outside: int | None = None  # regions around the compiled call that this thread is in


_thread = _RegionThread()


def noting_regions(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled function, so that the regions around its call are known in it."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a compiled function inlines this one
            return compiled(*args, **kwargs)
        before, _thread.outside = _thread.outside, _depth()
        try:
            return compiled(*args, **kwargs)
        finally:
            _thread.outside = before

    return call


def region_around(devices: Iterable[str]) -> tuple[bool, torch.dtype | None] | None:
    """(enabled, dtype) of the model's innermost region around what Dynamo compiles now, or None."""
    if _thread.outside is None or _depth() <= _thread.outside:
        return None
    for device in sorted(devices):
        if torch.is_autocast_enabled(device):
            return True, torch.get_autocast_dtype(device)
    return False, None


def _depth() -> int:
    torch.autocast_increment_nesting()
    depth: int = torch.autocast_decrement_nesting()
    return depth
