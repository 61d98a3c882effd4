"""The calls that a profile times, in the form in which a compiled program makes them.

- Products and convolutions are aten calls without autograd, forward and each gradient: these are
  what the compiled forward and backward run, and autograd's own cost is the same for every dtype.
- Weights already have the dtype; casting them is memory traffic, which "copy" measures.
- Convolutions are channels-last, whatever layout the user's model has: Inductor gives every
  convolution that layout on oneDNN and cuDNN (`decide_layout_opt` in torch/_inductor/graph.py).
- Attention and recurrent layers are torch's own kernels and their gradients, through autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .grid import Point

__all__ = ["Calls", "build"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Calls:
    """The two timed calls at one point in one dtype: the forward, and forward with backward."""

    forward: Callable[[], object]
    both: Callable[[], object]


def build(point: Point, dtype: torch.dtype, device: torch.device) -> Calls:
    """Make the operands of one point and the calls on them.

    Raises:
        RuntimeError: the memory of the device is too small.
    """
    builders: dict[str, Callable[..., Calls]] = {
        "gemm": _gemm,
        "attention": _attention,
        "rnn": _rnn,
        "copy": _copy,
    }

    def random(*shape: int) -> Tensor:
        # Small, so that sums over thousands of products stay finite in FP16.
        return torch.rand(shape, device=device).sub_(0.5).mul_(0.5).to(dtype)

    if point.kind == "conv":
        return _conv(random, point.stride, *point.dims)
    return builders[point.kind](random, *point.dims)


_Random = Callable[..., Tensor]


def _gemm(random: _Random, batch: int, m: int, n: int, k: int) -> Calls:
    if batch > 1:
        product, left, right = torch.bmm, random(batch, m, k), random(batch, k, n)
        gradient = random(batch, m, n)
    else:
        product, left, right = torch.mm, random(m, k), random(n, k).t()
        gradient = random(m, n)

    def both() -> tuple[Tensor, ...]:
        # The weight's gradient is computed in the layout in which the weight is stored.
        to_weight = (left.mT, gradient) if batch > 1 else (gradient.t(), left)
        return product(left, right), product(gradient, right.mT), product(*to_weight)

    return Calls(lambda: product(left, right), both)


def _conv(
    random: _Random,
    stride: int,
    batch: int,
    in_channels: int,
    out_channels: int,
    kernel: int,
    positions: int,
    groups: int,
) -> Calls:
    side, width = math.isqrt(positions), math.isqrt(kernel)
    assert (side * side, width * width) == (positions, kernel), "the grid has squares only"
    layout = torch.channels_last
    x = random(batch, in_channels, side * stride, side * stride).contiguous(memory_format=layout)
    weight = random(out_channels, in_channels // groups, width, width).contiguous(
        memory_format=layout
    )
    padding = 0 if stride >= width else width // 2
    where = [[stride, stride], [padding, padding], [1, 1], False, [0, 0], groups]

    def forward() -> Tensor:
        output: Tensor = aten.convolution.default(x, weight, None, *where)
        return output

    gradient = torch.empty_like(forward()).copy_(random(batch, out_channels, side, side))

    def both() -> tuple[Tensor, ...]:
        mask = [True, True, False]
        return forward(), *aten.convolution_backward.default(
            gradient, x, weight, None, *where, mask
        )

    return Calls(forward, both)


def _attention(random: _Random, batch: int, queries: int, keys: int, head: int) -> Calls:
    q, k, v = (random(1, batch, n, head).requires_grad_() for n in (queries, keys, keys))
    gradient = random(1, batch, queries, head)

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), (q, k, v), gradient)

    return Calls(forward, both)


_LAYERS: dict[int, Callable[[int, int], torch.nn.RNNBase]] = {
    4: torch.nn.LSTM,
    3: torch.nn.GRU,
    1: torch.nn.RNN,
}


def _rnn(random: _Random, batch: int, steps: int, input: int, hidden: int, gates: int) -> Calls:
    x = random(steps, batch, input).requires_grad_()
    gradient = random(steps, batch, hidden)
    layer = _LAYERS[gates](input, hidden).to(x.device, x.dtype)
    wanted = (x, *layer.parameters())

    def forward() -> Tensor:
        output: Tensor = layer(x)[0]
        return output

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), wanted, gradient)

    return Calls(forward, both)


def _copy(random: _Random, bytes: int) -> Calls:
    """One read and one write of half the bytes each, with arithmetic like elementwise code."""
    x = random(1)
    x = x.expand(max(1, bytes // (2 * x.element_size()))).contiguous()
    out = torch.empty_like(x)

    def forward() -> Tensor:
        return torch.add(x, 1.0, out=out)

    def both() -> tuple[Tensor, ...]:
        return forward(), forward()

    return Calls(forward, both)
