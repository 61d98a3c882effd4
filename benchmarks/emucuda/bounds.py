"""A kernel reads and writes nothing but the memory of its arguments.

On a GPU an address beyond it is an illegal access or, worse, another tensor's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

__all__ = ["Bounds", "watch"]


class Bounds:
    """The memory of the arguments of the kernel that runs."""

    def __init__(self) -> None:
        self.set("none", ())

    def set(self, kernel: str, tensors: Iterable[torch.Tensor]) -> None:
        storages = [t.untyped_storage() for t in tensors]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages}) or [(0, 0)]
        self.kernel = kernel
        self.starts, self.ends = (np.array(side, dtype=np.uint64) for side in zip(*spans))  # noqa: B905

    def check(self, what: str, addresses: Any, mask: Any, size: int) -> None:
        """Raise where an element of `size` bytes lies outside."""
        used = addresses[np.broadcast_to(mask, addresses.shape)].ravel()
        span = np.searchsorted(self.starts, used, side="right") - 1
        outside = (span < 0) | (used + np.uint64(size) > self.ends[span])
        if outside.any():
            raise RuntimeError(
                f"illegal memory access (emulated): {what} in {self.kernel}, {outside.sum()} of "
                f"{used.size} elements"
            )


def watch(bounds: Bounds) -> None:
    """Check each load, store and atomic operation of the interpreter's."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    update, exchange = builder.create_atomic_rmw, builder.create_atomic_cas

    def size_of(pointers: Any) -> int:
        found: int = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        return found

    def written(what: str, pointers: Any, value: Any, mask: Any) -> None:
        size = size_of(pointers)
        bounds.check(what, pointers.data, mask, size)
        if value.data.dtype.itemsize != size:
            raise RuntimeError(f"{what} of {value.data.dtype} to {pointers.get_element_ty()}")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        bounds.check("load", pointers.data, mask.data, size_of(pointers))
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        written("store", pointers, value, mask.data)
        return store(self, pointers, value, mask, *rest)

    def checked_update(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        written("atomic update", pointers, value, mask.data)
        return update(self, op, pointers, value, mask, *rest)

    def checked_exchange(self: Any, pointers: Any, old: Any, new: Any, *rest: Any) -> Any:
        written("atomic exchange", pointers, new, True)
        return exchange(self, pointers, old, new, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = checked_update, checked_exchange
