"""FlashAttention and the memory-efficient kernel: the host's attention, in FP32, rounded once.

Without dropout: `emucuda.cpp` writes attention with dropout out as products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .host import gradients, in_fp32, to_device
from .libraries import CUDA

__all__ = ["register"]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

ROWS = 32
"""The memory-efficient kernel pads the sums that it saves to a multiple of these."""


def register() -> None:
    """Let torch find these kernels."""
    CUDA.impl("_scaled_dot_product_flash_attention", _flash)
    CUDA.impl("_scaled_dot_product_flash_attention_backward", _flash_backward)
    CUDA.impl("_scaled_dot_product_efficient_attention", _efficient)
    CUDA.impl("_scaled_dot_product_efficient_attention_backward", _efficient_backward)


def _no_dropout(probability: float) -> None:
    if probability:
        raise NotImplementedError("the emulated GPU has no dropout in fused attention")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    bias = None if bias is None else in_fp32(bias)
    found: tuple[Tensor, Tensor] = _forward(
        in_fp32(q), in_fp32(k), in_fp32(v), 0.0, causal, attn_mask=bias, scale=scale
    )
    return found


def _alike(t: Tensor, like: Tensor) -> Tensor:
    """In memory as FlashAttention leaves it: as the operand lies there."""
    found: Tensor = torch.empty_like(like).copy_(to_device(t.to(like.dtype).contiguous()))
    return found


def _result(t: Tensor, like: Tensor) -> Tensor:
    """In memory as the memory-efficient kernel leaves it: batch, length, heads, size."""
    laid_out = to_device(t.to(like.dtype).transpose(1, 2).contiguous())
    found: Tensor = laid_out.transpose(1, 2)
    return found


def _zeros(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype, device="cuda")


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _no_dropout(dropout_p)
    out, sums = _attend(q, k, v, is_causal, scale)
    return (
        _alike(out, q), to_device(sums.contiguous()), None, None, q.shape[2], k.shape[2],
        _zeros(2, dtype=torch.uint64), _zeros(dtype=torch.uint64), _zeros(0, dtype=q.dtype),
    )  # fmt: skip


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts_q: Any,
    starts_k: Any, longest_q: int, longest_k: int, dropout_p: float, is_causal: bool, seed: Tensor,
    offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    operands = map(in_fp32, (grad, q, k, v, out, sums))
    grads = _backward(*operands, 0.0, is_causal, scale=scale)
    return tuple(_alike(g, x) for g, x in zip(grads, (q, k, v), strict=True))


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _no_dropout(dropout_p)
    out, sums = _attend(q, k, v, is_causal, scale, bias)
    rows = -(-sums.shape[2] // ROWS) * ROWS if compute_log_sumexp else 0
    saved = torch.full((*sums.shape[:2], rows), float("inf"))
    if rows:
        saved[..., : sums.shape[2]] = sums
    seed, offset = (_zeros(dtype=torch.int64) for _ in range(2))
    return _result(out, q), to_device(saved), seed, offset


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor,
    seed: Tensor, offset: Tensor, dropout_p: float, wanted: list[bool], is_causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if wanted[3] and bias is not None:
        return _with_bias(grad, q, k, v, bias, q.shape[-1] ** -0.5 if scale is None else scale)
    kept = in_fp32(sums)[..., : q.shape[2]].contiguous()
    operands = [in_fp32(t) for t in (grad, q, k, v, out)]
    mask = None if bias is None else in_fp32(bias)
    grads = _backward(*operands, kept, 0.0, is_causal, attn_mask=mask, scale=scale)
    return (*(_result(g, q) for g in grads), None)


def _with_bias(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """The host's kernel has no gradient of the bias."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (torch.softmax(q @ k.mT * scale + bias, -1) @ v,)

    *grads, of_bias = gradients(attend, [in_fp32(t) for t in (q, k, v, bias)], [in_fp32(grad)])
    return (*(_result(g, q) for g in grads), to_device(of_bias.to(bias.dtype)))
