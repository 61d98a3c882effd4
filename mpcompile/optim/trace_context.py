"""The context in which a step is traced: without torch's wrappers, and numbers stay tensors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..torch_inside.amp import autocast_off
from ..torch_inside.optimizers import is_hooked, said_to_compile, without_wrappers

F = TypeVar("F", bound=Callable[..., Any])

_tracing = threading.Lock()  # the process has only one compiling flag


@contextlib.contextmanager
def tracing(cls: type[Optimizer]) -> Iterator[None]:
    """The context for tracing the step of an optimizer of this class; one thread at a time."""
    with (
        _tracing,
        said_to_compile(),
        _unwrapped(cls),
        _items_stay_tensors(cls),
        torch.no_grad(),
        autocast_off(),
    ):
        yield


def untraced(method: F) -> F:
    """`torch.compiler.disable`, but the method keeps its type for callers: torch gives none."""
    disabled: F = torch.compiler.disable(method)
    return disabled


def raw_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """`cls.step` without torch's own wrappers (profiling and hooks, the grad mode switch).

    The user's own decorators stay, also `@torch.no_grad()`.
    """
    return without_wrappers(cls.step)


@contextlib.contextmanager
def _unwrapped(cls: type[Optimizer]) -> Iterator[None]:
    """Remove hooks and profiler ranges from `super().step()`: they are not part of the step."""
    wrapped: list[Any] = [c for c in cls.__mro__ if is_hooked(vars(c).get("step"))]
    steps = [c.step for c in wrapped]
    for base, step in zip(wrapped, steps, strict=True):
        base.step = step.__wrapped__
    try:
        yield
    finally:
        for base, step in zip(wrapped, steps, strict=True):
            base.step = step


@contextlib.contextmanager
def _items_stay_tensors(cls: type[Optimizer]) -> Iterator[None]:
    """Make `.item()` return the 0-d tensor, and `min` and `max` in the file of `cls` take tensors.

    So a step that reads numbers from the device to compute with them (Adafactor) becomes a graph
    without such reads. A branch on such a number still fails.
    """
    namespace = inspect.unwrap(cls.step).__globals__
    theirs = {name: namespace[name] for name in ("min", "max") if name in namespace}
    namespace.update(min=_of_tensors(min, torch.minimum), max=_of_tensors(max, torch.maximum))
    try:
        with _ItemIsTensor():
            yield
    finally:
        for name in ("min", "max"):
            del namespace[name]
        namespace.update(theirs)


def _of_tensors(builtin: Callable[..., Any], pairwise: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        tensor = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if tensor is None or len(args) == 1:
            return builtin(*args, **kwargs)
        numbers = (a if isinstance(a, torch.Tensor) else torch.full_like(tensor, a) for a in args)
        return functools.reduce(lambda x, y: pairwise(x, y.to(x.dtype)), numbers)

    return choose


class _ItemIsTensor(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.item and args[0].is_floating_point():
            return args[0].float()
        return func(*args, **(kwargs or {}))
