"""Restores what tracing a model changes in the process: random states, and what Dynamo remembers.

Meanwhile Python's cyclic garbage collector is off: tracing makes many objects, nearly all of which
live to its end, and looking through them again and again would take a tenth of the time and more.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator

from ..runtime.compile_apart import nothing_happened
from ..torch_inside.names import cached_backends, counters

__all__ = ["no_trace"]


@contextlib.contextmanager
def no_trace() -> Iterator[None]:
    """A context. Behind it are as before: the random states of Python, NumPy and torch's CPU; and
    Dynamo's sizes, from which it infers which are dynamic, its counters, and its list of backends.

    What Dynamo compiled for the user's functions behind a graph break stays until
    `torch._dynamo.reset()`; their own compilations are kept apart from it (from torch 2.13 on).
    """
    collects, counts = gc.isenabled(), copy.deepcopy(counters)
    backends = set(cached_backends)
    gc.disable()
    try:
        with nothing_happened():
            yield
    finally:
        if collects:
            gc.enable()
        counters.clear()
        counters.update(counts)
        for new in cached_backends.keys() - backends:
            del cached_backends[new]
