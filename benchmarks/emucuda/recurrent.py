"""cuDNN's LSTM and GRU: the host's layers in FP32, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .host import gradients, in_fp32, to_device
from .libraries import CUDA

__all__ = ["MODES", "register"]

MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
"""cuDNN's numbers for the kinds of layers, of which the last two are here."""


def register() -> None:
    """Let torch find these kernels."""
    CUDA.impl("_cudnn_rnn", _forward)
    CUDA.impl("_cudnn_rnn_backward", _backward)
    CUDA.impl("_cudnn_rnn_flatten_weight", _flatten)


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


def _forward(
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


def _backward(
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
