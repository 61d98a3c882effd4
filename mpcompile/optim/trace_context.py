"""The context in which a step is traced: numbers stay tensors. And a step without wrappers."""

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

from ..torch_inside.replace import Spot, put

F = TypeVar("F", bound=Callable[..., Any])


def untraced(method: F) -> F:
    """`torch.compiler.disable`, but the method keeps its type for callers: torch gives none."""
    disabled: F = torch.compiler.disable(method)
    return disabled


@contextlib.contextmanager
def items_stay_tensors(cls: type[Optimizer]) -> Iterator[None]:
    """Make `.item()` return the 0-d tensor, and `min` and `max` in the file of `cls` take tensors,
    in this thread.

    So a step that reads numbers from the device to compute with them (Adafactor) becomes a graph
    without such reads. A branch on such a number still fails.
    """
    namespace = inspect.unwrap(cls.step).__globals__
    pairs = {"min": (min, torch.minimum), "max": (max, torch.maximum)}
    with contextlib.ExitStack() as undo:
        for name, (builtin, pairwise) in pairs.items():
            ours = _of_tensors(namespace.get(name, builtin), pairwise)
            undo.callback(put(Spot(namespace, name), ours))
        undo.enter_context(_ItemIsTensor())
        yield


def _of_tensors(builtin: Callable[..., Any], pairwise: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def choose(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return builtin(*args, **kwargs)
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
