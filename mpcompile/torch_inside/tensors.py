"""The memory of tensors, and functions over many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .private_names import MissingInTorch, Part, attribute, private

if TYPE_CHECKING:
    from torch import _add_batch_dim as _batched
    from torch import _check as check
    from torch import _foreach_copy_ as copy_all
    from torch import _foreach_mul_ as multiply_all
    from torch import _foreach_norm as norm_of_each
    from torch import _remove_batch_dim as _unbatched
    from torch._C import _dispatch_keys
    from torch._C import _storage_Use_Count as _use_count
    from torch._C import _vmapmode_decrement_nesting as _leave_batch
    from torch._C import _vmapmode_increment_nesting as _enter_batch
    from torch._C._dynamo.guards import TensorGuards
    from torch._C._functorch import is_functorch_wrapped_tensor, unwrap_if_dead
    from torch._prims_common import suggest_memory_format
else:
    check = private("torch:_check", "says what an operator expects", Part.COMPILE)
    copy_all = private("torch:_foreach_copy_", "copies many tensors at once", Part.COMPILE)
    multiply_all = private("torch:_foreach_mul_", "unscales many gradients at once", Part.COMPILE)
    norm_of_each = private("torch:_foreach_norm", "measures many tensors at once", Part.COMPILE)
    TensorGuards = private(
        "torch._C._dynamo.guards:TensorGuards", "compares many tensors at once", Part.OPTIMIZER
    )
    _use_count = private(
        "torch._C:_storage_Use_Count", "tells whether memory is in use", Part.OPTIMIZER
    )
    _BATCHES = "takes batched gradients apart"
    _batched = private("torch:_add_batch_dim", _BATCHES, Part.SAY)
    _unbatched = private("torch:_remove_batch_dim", _BATCHES, Part.SAY)
    _dispatch_keys = private("torch._C:_dispatch_keys", "tells batched gradients", Part.SAY)
    _enter_batch = private("torch._C:_vmapmode_increment_nesting", _BATCHES, Part.SAY)
    _leave_batch = private("torch._C:_vmapmode_decrement_nesting", _BATCHES, Part.SAY)
    is_functorch_wrapped_tensor = private(
        "torch._C._functorch:is_functorch_wrapped_tensor", "tells vmap's tensors", Part.COMPILE
    )
    unwrap_if_dead = private(
        "torch._C._functorch:unwrap_if_dead", "takes a value out of a transform", Part.COMPILE
    )
    suggest_memory_format = private(
        "torch._prims_common:suggest_memory_format", "keeps images channels-last", Part.COMPILE
    )

__all__ = [
    "TensorGuards",
    "check",
    "copy_all",
    "for_each_sample",
    "holders",
    "is_functorch_wrapped_tensor",
    "multiply_all",
    "norm_of_each",
    "sparse_values",
    "storage_of",
    "suggest_memory_format",
    "unwrap_if_dead",
    "whole",
]


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory of a strided tensor, fake or real, while it lives; equal for views."""
    return int(tensor.untyped_storage()._cdata)


def holders(memory: torch.UntypedStorage) -> int:
    """How many tensors, in Python or C++, hold this memory, and a number of its own besides."""
    return _use_count(memory._cdata)


def _level() -> int:
    """How many batches of gradients this thread's backward is for: `is_grads_batched=True`. Without
    torch's old `vmap`, which makes them, there are none.
    """
    try:
        level = _enter_batch() - 1
    except MissingInTorch:
        return 0
    _leave_batch()
    return level


def _is_batched(value: Any, level: int) -> bool:
    if level == 0 or not isinstance(value, torch.Tensor):
        return False
    return "Batched" in str(_dispatch_keys(value))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of a batched gradient that of all samples, with a dimension more; else the tensor itself."""
    level = _level()
    return _unbatched(tensor, level, 0, 0) if _is_batched(tensor, level) else tensor


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
    stacked = {i: _unbatched(values[i], level, 0, 0) for i in places}
    samples = zip(*(stacked[i].unbind() for i in places), strict=True)
    found = []
    _leave_batch()  # the function may compile
    try:
        for sample in samples:
            own = dict(zip(places, sample, strict=True))
            found.append(function(*(own.get(i, value) for i, value in enumerate(values))))
    finally:
        _enter_batch()
    return tuple(
        None if each[0] is None else _batched(torch.stack(each), 0, level)
        for each in zip(*found, strict=True)
    )


def sparse_values(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a sparse tensor that may name a place twice: `values()` refuses one."""
    return gradient._values()


attribute("torch:UntypedStorage._cdata", "tells what shares memory", Part.COMPILE)
attribute("torch._C:_storage_Use_Count()", "tells whether memory is in use", Part.OPTIMIZER)
attribute("torch:Tensor._values", "reads sparse gradients", Part.COMPILE)
