"""The kernels of operators that run by themselves, outside of what Inductor compiles.

An operator is one kernel, which reads its operands on the device and writes its results. Views and
empty tensors are none. The multi-tensor operators take lists (`multi_tensor.py`). What each moves
is stated in its own source:

* `_fused_adamw_`: reads p, g, m, v and writes p, m, v: 28 bytes for each FP32 parameter. Under a
  GradScaler it unscales, and writes g as well: 32 (fused_adam_utils.cuh).
* `_amp_foreach_non_finite_check_and_unscale_`: reads and writes g, 8 (AmpKernels.cu).
* `_foreach_*`: reads its lists and writes what it returns or changes.

Read in torch 2.13, built for CUDA 13 as on PyPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .launches import Launch, in_parts
from .multi_tensor import TENSORS, launches_of

__all__ = ["eager_launches"]

aten = torch.ops.aten

_NO_KERNEL = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten._local_scalar_dense.default, aten._reshape_alias.default,
}  # fmt: skip

# Nothing is read of what these are like, which may lie elsewhere.
_LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}

_WRITE_ONLY = {
    aten.copy_.default, aten._foreach_copy_.default, aten.fill_.Scalar, aten.fill_.Tensor,
    aten.zero_.default, aten._foreach_zero_.default,
}  # fmt: skip


def eager_launches(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> list[Launch]:
    """The kernels that a call of an operator launches on the device."""
    if op.namespace == "prim" or op.is_view or op in _NO_KERNEL:
        return []
    operands = _on_device((args, kwargs))
    results = _on_device(result)
    if not results and (not operands or op in _LIKE):
        return []
    written = _written(op, args, kwargs)
    if op is aten._fused_adamw_.default and kwargs.get("grad_scale") is None:
        written = [t for t in written if not any(t is g for g in args[1])]
    read = [t for t in operands if op not in _WRITE_ONLY or not any(t is w for w in written)]
    moved = _bytes(read) + _bytes(written) + _bytes(_new(results, operands))
    lists = [a for a in args if isinstance(a, (list, tuple)) and _on_device(a)]
    if not lists or not _is_multi_tensor(op):
        return [Launch(str(op), "library", moved)]
    if op is aten._fused_adamw_.default:
        lists = lists[:4]  # the counters come along with them
    number = launches_of([t.numel() for t in lists[0]], TENSORS[len(lists) - 1])
    return in_parts(Launch(str(op), "library", moved), number)


def _is_multi_tensor(op: torch._ops.OpOverload) -> bool:
    name = op._schema.name
    return "_foreach_" in name or "_fused_" in name


def _on_device(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.device.type == "cuda"]


def _written(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The operands that the operator changes."""
    changed = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return _on_device(changed)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _new(results: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    known = {id(t) for t in operands}
    return [t for t in results if id(t) not in known]
