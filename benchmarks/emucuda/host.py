"""Kernels in Python: the same memory on the host, and autograd from within a kernel."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["gradients", "in_fp32", "to_device", "to_host"]

to_host, to_device = torch.ops.emucuda.to_host, torch.ops.emucuda.to_device


def in_fp32(t: Tensor) -> Tensor:
    """Its values on the host."""
    found: Tensor = to_host(t).float()
    return found


def gradients(
    function: Callable[..., Sequence[Tensor]],
    operands: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Tensor]:
    """Of a function on the host, by autograd, as seen from within a kernel.

    In a thread of its own: this one runs below autograd, which would record nothing.
    """
    leaves = [t.detach().clone() for t in operands]

    def differentiate() -> list[Tensor]:
        for leaf in leaves:
            leaf.requires_grad_()
        results = function(*leaves)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None]
        found: Sequence[Tensor | None] = torch.autograd.grad(
            [r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
        )
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(differentiate).result()
