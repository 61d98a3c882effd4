"""Compiling a module apart from what its user compiles of it, and without a trace."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import MPCompileError
from ..torch_inside.modules import plain_call
from ..torch_inside.names import get_code_state
from .left_to_python import entry
from .owned_backend import compiled_by

_numbers = itertools.count()


def compiled_apart(
    module: nn.Module, backend: Callable[..., Any], purpose: str
) -> Callable[..., Any]:
    """The module's call, compiled for fixed sizes under a name of its own, with `purpose` in it."""
    name = f"{purpose}_{next(_numbers)}_of_{type(module).__name__}"
    own = entry(plain_call(type(module)), module, name)
    # torch 2.12 counts what the user compiles of its functions, too.
    return compiled_by(backend, own, dynamic=False, recompile_limit=1000)


def nothing_compiled(name: str) -> MPCompileError:
    """The error where Dynamo has compiled nothing of the call of a module of this class."""
    return MPCompileError(
        f"no part of {name} was compiled: torch.compile skipped its forward (an "
        "unsupported construct at the top of it, or compilation is disabled); "
        "TORCH_LOGS=graph_breaks tells why"
    )


@contextlib.contextmanager
def nothing_happened() -> Iterator[None]:
    """Restore the random states, and the sizes from which Dynamo infers which are dynamic."""
    state, numbers = random.getstate(), np.random.get_state()
    sizes = get_code_state()
    before = copy.deepcopy(sizes)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
        sizes.clear()
        sizes.update(before)
