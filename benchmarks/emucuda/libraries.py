"""Operators of CUDA's libraries that the CPU build has no schema's kernel for: cuBLAS, cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CUDA", "register"]

CUDA = torch.library.Library("aten", "IMPL", "CUDA")
"""Where the kernels in Python are registered."""


def register() -> None:
    """Let torch find these kernels."""
    for name, product in (
        ("mm", torch.mm), ("bmm", torch.bmm), ("addmm", torch.addmm), ("baddbmm", torch.baddbmm),
    ):  # fmt: skip
        wide = _with_dtype(product)
        CUDA.impl(f"{name}.dtype", wide)
        CUDA.impl(f"{name}.dtype_out", _written_to_out(wide))
    CUDA.impl("cudnn_batch_norm", _batch_norm)
    CUDA.impl("cudnn_batch_norm_backward", _batch_norm_backward)


def _with_dtype(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product of low operands with the result in another dtype: cuBLAS's own, summed in FP32."""

    def multiply(*operands: Any, **kwargs: Any) -> Tensor:
        *tensors, dtype = operands
        low = tensors[-1].dtype
        if any(t.dtype != low for t in tensors[-2:]):
            raise RuntimeError("expected mat1 and mat2 to have the same dtype")
        if dtype not in (low, torch.float32):
            raise RuntimeError(f"out_dtype must be the operands' {low} or FP32, not {dtype}")
        return product(*(t.float() for t in tensors), **kwargs).to(dtype)

    return multiply


def _written_to_out(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(*operands: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return out.copy_(multiply(*operands, **kwargs))

    return write


def _batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    result, saved_mean, saved_deviation = torch.native_batch_norm(
        x, weight, bias, mean, var, training, momentum, eps
    )
    reserve = torch.empty(0, dtype=torch.uint8, device="cuda")
    return result, saved_mean, saved_deviation, reserve


def _batch_norm_backward(
    x: Tensor, grad: Tensor, weight: Tensor, mean: Tensor | None, var: Tensor | None,
    saved_mean: Tensor, saved_deviation: Tensor, eps: float, reserve: Tensor,
) -> Any:  # fmt: skip
    return torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, mean, var, saved_mean, saved_deviation, True, eps, [True, True, True]
    )
