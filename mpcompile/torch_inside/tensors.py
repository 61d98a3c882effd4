"""The memory of tensors, and functions over many of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .private_names import Part, attribute, private

if TYPE_CHECKING:
    from torch import _check as check
    from torch import _foreach_copy_ as copy_all
    from torch import _foreach_norm as norm_of_each
    from torch._C import _storage_Use_Count as _use_count
    from torch._C._dynamo.guards import TensorGuards
    from torch._C._functorch import is_functorch_wrapped_tensor, unwrap_if_dead
    from torch._prims_common import make_contiguous_strides_for, suggest_memory_format
else:
    check = private("torch:_check", "says what an operator expects", Part.COMPILE)
    copy_all = private("torch:_foreach_copy_", "copies many tensors at once", Part.COMPILE)
    norm_of_each = private("torch:_foreach_norm", "measures many tensors at once", Part.COMPILE)
    TensorGuards = private(
        "torch._C._dynamo.guards:TensorGuards", "compares many tensors at once", Part.OPTIMIZER
    )
    _use_count = private(
        "torch._C:_storage_Use_Count", "tells whether memory is in use", Part.OPTIMIZER
    )
    is_functorch_wrapped_tensor = private(
        "torch._C._functorch:is_functorch_wrapped_tensor", "tells vmap's tensors", Part.COMPILE
    )
    unwrap_if_dead = private(
        "torch._C._functorch:unwrap_if_dead", "takes a value out of a transform", Part.COMPILE
    )
    make_contiguous_strides_for = private(
        "torch._prims_common:make_contiguous_strides_for", "lays out gradients", Part.OPTIMIZER
    )
    suggest_memory_format = private(
        "torch._prims_common:suggest_memory_format", "keeps images channels-last", Part.COMPILE
    )

__all__ = [
    "TensorGuards",
    "check",
    "copy_all",
    "holders",
    "is_functorch_wrapped_tensor",
    "make_contiguous_strides_for",
    "norm_of_each",
    "sparse_values",
    "storage_of",
    "suggest_memory_format",
    "unwrap_if_dead",
]


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory of a strided tensor, fake or real, while it lives; equal for views."""
    return int(tensor.untyped_storage()._cdata)


def holders(memory: torch.UntypedStorage) -> int:
    """How many tensors, in Python or C++, hold this memory, and a number of its own besides."""
    return _use_count(memory._cdata)


def sparse_values(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a sparse tensor that may name a place twice: `values()` refuses one."""
    return gradient._values()


attribute("torch:UntypedStorage._cdata", "tells what shares memory", Part.COMPILE)
attribute("torch._C:_storage_Use_Count()", "tells whether memory is in use", Part.OPTIMIZER)
attribute("torch:Tensor._values", "reads sparse gradients", Part.COMPILE)
