"""Restores what tracing a model changes in the process: random states, and what Dynamo remembers.

Meanwhile Python's cyclic garbage collector is off: tracing makes many objects, nearly all of which
live to its end, and looking through them again and again would take a tenth of the time and more.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import numpy as np
import torch
from torch._dynamo import pgo
from torch._dynamo.eval_frame import cached_backends
from torch._dynamo.utils import counters

__all__ = ["LeaveNoTrace"]


class LeaveNoTrace:
    """A context. Behind it are as before: the random states of Python, NumPy and torch's CPU; and
    Dynamo's sizes, from which it infers which are dynamic, its counters, and its list of backends.

    What Dynamo compiled for the user's functions behind a graph break stays until
    `torch._dynamo.reset()`; their own compilations are kept apart from it (from torch 2.12 on).
    """

    def __enter__(self) -> LeaveNoTrace:
        self._collects = gc.isenabled()
        gc.disable()
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = torch.random.fork_rng(devices=[])
        self._torch.__enter__()
        self._sizes, self._counts = copy.deepcopy(pgo.get_code_state()), copy.deepcopy(counters)
        self._backends = set(cached_backends)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._collects:
            gc.enable()
        self._torch.__exit__(*error)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        _restore(pgo.get_code_state(), self._sizes)
        _restore(counters, self._counts)
        for new in cached_backends.keys() - self._backends:
            del cached_backends[new]


def _restore(kept: dict[Any, Any], was: dict[Any, Any]) -> None:
    kept.clear()
    kept.update(was)
