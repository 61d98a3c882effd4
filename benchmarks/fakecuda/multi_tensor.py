"""The kernels of torch's operators over lists of tensors.

How many tensors and how much of them one launch takes is stated in MultiTensorApply.cuh. A norm of
each tensor takes two more kernels: zeros for the norms of the parts, and what makes one norm of
those (ForeachReduceOp.cu).

Read in torch 2.13, built for CUDA 13 as on PyPI.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TENSORS", "launches_of", "short_ones"]

_CHUNK = 65536  # elements that a block takes (kChunkSize)
_BLOCKS = 2240  # blocks of a launch (depth_to_max_blocks)
TENSORS = (770, 448, 336, 252, 210)  # of each list, by the number of lists (depth_to_max_tensors)


def launches_of(sizes: Sequence[int], most: int) -> int:
    """How many kernels `multi_tensor_apply` launches for tensors of these numbers of elements.

    Args:
        most: tensors that one launch takes.
    """
    found = tensors = blocks = 0
    for size in filter(None, sizes):
        tensors += 1
        chunks = -(-size // _CHUNK)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == _BLOCKS or (last and tensors == most):
                found += 1
                blocks, tensors = 0, 0 if last else 1
    return found + bool(blocks)


def short_ones(operator: str) -> tuple[str, ...]:
    """The names of short kernels that an operator launches besides."""
    return (
        ("zeros of partial norms", "norms of partial norms") if "_foreach_norm" in operator else ()
    )
