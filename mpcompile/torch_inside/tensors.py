"""The memory of tensors, and functions over many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .names import batched, dispatch_keys, enter_batch, leave_batch, unbatched, use_count
from .private_names import MissingInTorch


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
