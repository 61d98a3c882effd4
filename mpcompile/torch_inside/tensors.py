"""Tensors: what autograd notes of them, the mark by which one is known, their memory, and functions
over many of them.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .names import batched, dispatch_keys, enter_batch, leave_batch, unbatched, use_count
from .private_names import MissingInTorch

# What is read of each tensor in each step, by `operator.attrgetter`, which makes no frame.
version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often the memory of a tensor was written, as autograd counts it."""
hooks_on: Callable[[torch.Tensor], tuple[Any, Any]] = operator.attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""A parameter's hooks on its gradient, and those after its accumulation; empty or None: none."""


def base_of(result: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd takes this one for a view of; None: it is no view."""
    return result._base


def function_of(grad_fn: Any) -> Any:
    """The autograd.Function whose backward a node of autograd's graph runs, or None."""
    if not isinstance(grad_fn, torch.autograd.function.BackwardCFunction):
        return None
    return type(grad_fn)._forward_cls  # type: ignore[attr-defined]


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the backward that runs in this thread, as DDP's is called. It
    may call this again: then another is called after it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_enabled(autocast: torch.autocast) -> bool:
    """Whether it turns autocast on where it is entered: not with `enabled=False`."""
    return autocast._enabled


# -- identity --------------------------------------------------------------------------------------

MARK = "_mp_mark"


class TensorMark:
    """Stands for a tensor where it must not be kept alive, and holds what is known of it.

    The tensor has it in its `__dict__`. To a weak reference to the tensor itself torch objects: it
    exchanges what two tensors hold (`torch.utils.swap_tensors`; `Module.to` and `load_state_dict`
    under `torch.__future__.set_swap_module_params_on_conversion`; `Module.to` of DTensors always)
    only where there is none. A tensor that was exchanged has no mark until it gets another. A
    pickle has an empty dictionary in its place, which `torch.load` takes with `weights_only`.

    Attributes:
        state: what is known of the tensor.
        as_written: the version in which its infinities are the program's own; -1: none.
        tensor: gives the tensor to who holds the mark and has asked for that (`found_by`).
    """

    __slots__ = ("__weakref__", "as_written", "of", "state", "tensor")

    def __init__(self, of: int) -> None:
        self.of = of
        self.state: Any = None
        self.as_written = -1
        self.tensor: Callable[[], torch.Tensor | None] = lambda: None

    def __reduce__(self) -> Any:
        return OrderedDict, ()

    def __deepcopy__(self, _: Any) -> None:
        return None


def mark_on(tensor: torch.Tensor) -> TensorMark | None:
    """The mark that a tensor has, or None."""
    found = tensor.__dict__.get(MARK)
    return found if type(found) is TensorMark and found.of == id(tensor) else None


def mark_of(tensor: torch.Tensor) -> TensorMark:
    """The mark that a tensor has, or gets now."""
    with _marking:
        found = mark_on(tensor)
        if found is None:
            found = tensor.__dict__[MARK] = TensorMark(id(tensor))
    return found


_marking = threading.RLock()


def found_by(tensor: torch.Tensor) -> TensorMark:
    """The mark of a tensor, by which it is found while it lives. A parameter stays swappable: it is
    a cycle with its mark, which goes when Python collects garbage. Another leaf, which may be new
    in each call, goes at once.
    """
    mark = mark_of(tensor)
    mark.tensor = (lambda: tensor) if isinstance(tensor, nn.Parameter) else weakref.ref(tensor)
    return mark


def marks_of(tensors: Iterable[torch.Tensor]) -> list[weakref.ref[TensorMark]]:
    """By which `marks_match` tells whether they are the same tensors later."""
    return [weakref.ref(mark_of(tensor)) for tensor in tensors]


def marks_match(marks: Sequence[weakref.ref[TensorMark]], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these living tensors are those, in order, that `marks_of` was asked of."""
    pairs = zip(marks, tensors, strict=True)  # of those that are gone None, as a new one's mark
    return all((mark := mark_on(x)) is not None and ref() is mark for ref, x in pairs)


# -- memory ----------------------------------------------------------------------------------------


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory of a strided tensor, fake or real, while it lives; equal for views."""
    return int(tensor.untyped_storage()._cdata)


def holders(memory: torch.UntypedStorage) -> int:
    """How many tensors, in Python or C++, hold this memory, and a number of its own besides."""
    return use_count(memory._cdata)


def _level() -> int:
    """How many batches of gradients this thread's backward is for: `is_grads_batched=True`. Without
    torch's old `vmap`, which makes them, there are none.
    """
    try:
        level = enter_batch() - 1
    except MissingInTorch:
        return 0
    leave_batch()
    return level


def _is_batched(value: Any, level: int) -> bool:
    if level == 0 or not isinstance(value, torch.Tensor):
        return False
    return "Batched" in str(dispatch_keys(value))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of a batched gradient that of all samples, with a dimension more; else the tensor itself."""
    level = _level()
    return unbatched(tensor, level, 0, 0) if _is_batched(tensor, level) else tensor


def for_each_sample(
    function: Callable[..., Sequence[Any]], values: Sequence[Any]
) -> tuple[Any, ...] | None:
    """A function of gradients, called with those of each sample of the batch that they are; None
    if no value is batched. It may return None in place of a gradient, of all samples.
    """
    if (level := _level()) == 0:
        return None  # as in each ordinary backward
    places = [i for i, value in enumerate(values) if _is_batched(value, level)]
    if not places:
        return None
    stacked = {i: unbatched(values[i], level, 0, 0) for i in places}
    samples = zip(*(stacked[i].unbind() for i in places), strict=True)
    found = []
    leave_batch()  # the function may compile
    try:
        for sample in samples:
            own = dict(zip(places, sample, strict=True))
            found.append(function(*(own.get(i, value) for i, value in enumerate(values))))
    finally:
        enter_batch()
    return tuple(
        None if each[0] is None else batched(torch.stack(each), 0, level)
        for each in zip(*found, strict=True)
    )


def sparse_values(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a sparse tensor that may name a place twice: `values()` refuses one."""
    return gradient._values()


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_bad(value: Any) -> bool:
    """Whether an input is not finite. Minus infinity is: it masks out."""
    if not is_float(value):
        return False
    value = value.detach()
    dense = value.coalesce().values() if value.is_sparse else value
    return bool((dense.isnan() | dense.isposinf()).any())
