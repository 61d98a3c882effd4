"""Kernels in Python, on the host: of cuBLAS, cuDNN, FlashAttention and the memory-efficient one.

They see the same memory on the host; autograd works from within a kernel.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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


# -- libraries -------------------------------------------------------------------------------------
# Operators of CUDA's libraries that the CPU build has no schema's kernel for: cuBLAS, cuDNN.

CUDA = torch.library.Library("aten", "IMPL", "CUDA")
"""Where the kernels in Python are registered."""


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


# -- attention -------------------------------------------------------------------------------------
# FlashAttention and the memory-efficient kernel: the host's attention, in FP32, rounded once.
#
# Without dropout: `emucuda.cpp` writes attention with dropout out as products.

_host_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_host_attention_backward = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)

ROWS = 32
"""The memory-efficient kernel pads the sums that it saves to a multiple of these."""


def _no_dropout(probability: float) -> None:
    if probability:
        raise NotImplementedError("the emulated GPU has no dropout in fused attention")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    bias = None if bias is None else in_fp32(bias)
    found: tuple[Tensor, Tensor] = _host_attention(
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
    grads = _host_attention_backward(*operands, 0.0, is_causal, scale=scale)
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
    grads = _host_attention_backward(*operands, kept, 0.0, is_causal, attn_mask=mask, scale=scale)
    return (*(_result(g, q) for g in grads), None)


def _with_bias(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """The host's kernel has no gradient of the bias."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (torch.softmax(q @ k.mT * scale + bias, -1) @ v,)

    *grads, of_bias = gradients(attend, [in_fp32(t) for t in (q, k, v, bias)], [in_fp32(grad)])
    return (*(_result(g, q) for g in grads), to_device(of_bias.to(bias.dtype)))


# -- recurrent -------------------------------------------------------------------------------------
# cuDNN's LSTM and GRU: the host's layers in FP32, rounded once.

MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
"""cuDNN's numbers for the kinds of layers, of which the last two are here."""


def _layers(
    x: Tensor, hx: Tensor, cx: Tensor | None, weights: Sequence[Tensor], biases: bool, layers: int,
    batch_first: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    rest = (list(weights), biases, layers, 0.0, False, bidirectional, batch_first)
    found: tuple[Tensor, ...]
    found = torch.gru(x, hx, *rest) if cx is None else torch.lstm(x, (hx, cx), *rest)
    return found


def _check(mode: int, dropout: float, train: bool, sizes: Sequence[int], *given: Tensor) -> None:
    if mode not in (MODES["LSTM"], MODES["GRU"]) or sizes or (dropout and train):
        raise NotImplementedError(
            "the emulated GPU has of cuDNN's layers the LSTM and the GRU, without dropout between "
            "layers and without packed sequences"
        )
    if len({t.dtype for t in given}) > 1:
        raise RuntimeError("cuDNN: the input, the states and the weights have different dtypes")


def _nothing(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cuda")


def _recur(
    x: Tensor, weight: Sequence[Tensor], stride0: int, buffer: Tensor | None, hx: Tensor,
    cx: Tensor | None, mode: int, hidden: int, projection: int, layers: int, batch_first: bool,
    dropout: float, train: bool, bidirectional: bool, sizes: Sequence[int], state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(mode, dropout, train, sizes, x, hx, *weight)
    cells = None if cx is None else in_fp32(cx)
    found = _layers(
        in_fp32(x), in_fp32(hx), cells, [in_fp32(w) for w in weight], stride0 == 4, layers,
        batch_first, bidirectional,
    )  # fmt: skip
    output, *last = (to_device(t.to(x.dtype).contiguous()) for t in found)
    if cx is None:
        last.append(_nothing(x.dtype))
    return output, *last, _nothing(torch.uint8), _nothing(x.dtype)


def _recur_backward(
    x: Tensor, weight: Sequence[Tensor], stride0: int, buffer: Tensor, hx: Tensor,
    cx: Tensor | None, output: Tensor, grad_output: Tensor | None, grad_hy: Tensor | None,
    grad_cy: Tensor | None, mode: int, hidden: int, projection: int, layers: int,
    batch_first: bool, dropout: float, train: bool, bidirectional: bool, sizes: Sequence[int],
    state: Tensor | None, reserve: Tensor, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    operands = [x, hx, *([] if cx is None else [cx]), *weight]
    states = 2 if cx is None else 3  # of the operands: the input and the states

    def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
        cells = None if cx is None else leaves[2]
        return _layers(
            leaves[0], leaves[1], cells, leaves[states:], stride0 == 4, layers, batch_first,
            bidirectional,
        )  # fmt: skip

    grads: list[Any] = [grad_output, grad_hy, *([] if cx is None else [grad_cy])]
    grads = [None if g is None else in_fp32(g) for g in grads]
    found = gradients(forward, [in_fp32(t) for t in operands], grads)
    placed = [to_device(g.to(x.dtype)) for g in found]
    of_cells = placed[2] if states == 3 else _nothing(x.dtype)
    return placed[0], placed[1], of_cells, placed[states:]


def _flatten(weight: Sequence[Tensor], *layout: Any) -> Tensor:
    """The weights become views of one buffer, as cuDNN wants them."""
    shapes = [w.shape for w in weight]
    buffer = torch.cat([w.reshape(-1) for w in weight])
    at = 0
    for w, shape in zip(weight, shapes, strict=True):
        w.set_(buffer.untyped_storage(), at, shape, w.contiguous().stride())
        at += shape.numel()
    return buffer


# -- all of them -----------------------------------------------------------------------------------


def register() -> None:
    """Let torch find these kernels."""
    for name, product in (
        ("mm", torch.mm), ("bmm", torch.bmm), ("addmm", torch.addmm), ("baddbmm", torch.baddbmm),
    ):  # fmt: skip
        wide = _with_dtype(product)
        CUDA.impl(f"{name}.dtype", wide)
        CUDA.impl(f"{name}.dtype_out", _written_to_out(wide))
    for name, kernel in {
        "cudnn_batch_norm": _batch_norm,
        "cudnn_batch_norm_backward": _batch_norm_backward,
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "_cudnn_rnn": _recur,
        "_cudnn_rnn_backward": _recur_backward,
        "_cudnn_rnn_flatten_weight": _flatten,
    }.items():
        CUDA.impl(name, kernel)
