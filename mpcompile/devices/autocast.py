"""Someone else's autocast around a compiled model, and the model's own.

A framework brings it along when it is told to train in FP16 or BF16. Nobody is to get dtypes chosen
twice without a word. (Of a GradScaler, which it may bring as well, `scaling/hooks.py` warns.)

* A `forward` that was replaced, on the module, by one under autocast: refused. The region would
  cover the whole program, and what a program says about its dtypes counts more than our plan.
* Autocast around the call: off inside of it, and said once. So the program that is compiled is the
  one without it, and so are the dtypes of its results. A `torch.compile(backend="mpcompile")` is
  traced before we are called; there it is off inside the graph, and results have its dtype.

Torch counts how deep regions are nested. Those that are deeper than the compiled call are the
model's own; those of its caller change nothing. Two things this can't tell. The count knows no
device, so a region for another one than the graph's counts as well. And Dynamo doesn't guard on
it: a function that runs in such a region and elsewhere keeps the graphs that it got first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .. import logs
from ..errors import MPCompileError
from ..torch_inside.tensors import is_enabled
from . import registry


def refuse_autocast_forward(module: nn.Module) -> None:
    """Refuse a module whose forward someone has replaced by one under autocast."""
    forward: Any = vars(module).get("forward")
    while forward is not None:
        for autocast in _autocasts(getattr(forward, "__func__", forward)):
            raise MPCompileError(
                f"the forward of this {type(module).__name__} was replaced by one under "
                f"autocast({autocast.fast_dtype}), which chooses dtypes, too: take it off. If that "
                'is Accelerate: Accelerator(mixed_precision="no"), TrainingArguments without bf16 '
                "and fp16, or MPCompileAccelerator or MPCompileTrainer of mpcompile.integrations"
            )
        forward = getattr(forward, "__wrapped__", None)


def _autocasts(function: Any) -> list[Any]:
    """The enabled autocasts that a function made by autocast's decorator enters."""
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [a for a in held if isinstance(a, torch.autocast) and is_enabled(a)]


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast is off, as Dynamo sees it, too; where it was on, this is said."""
    off = contextlib.ExitStack()
    for device in registry.supported():
        if torch.is_autocast_enabled(device):
            say_autocast(torch.get_autocast_dtype(device))
            off.enter_context(torch.autocast(device, enabled=False))
    return off


@functools.cache
def say_autocast(dtype: torch.dtype | None) -> None:
    """Say, once, that autocast is on around a call of what is compiled."""
    text = (
        "autocast(%(dtype)s) is on where a compiled model is called. It has no effect inside of "
        "it; leave it out, or keep it for what else runs under it"
    )
    logs.event("compile", logging.WARNING, "autocast", text, dtype=str(dtype))


# -- the model's own autocast ----------------------------------------------------------------------


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
