"""oneDNN's LSTM layer and its backward, for a graph that holds both.

Torch's own operators are made for autograd, which asks less of them than a graph does:

* `aten::mkldnn_rnn_layer` makes the workspace that its backward needs only in grad mode, and its
  fake has no bytes in it: so ours has a size of 0, too, and the bytes are after that (Inductor of
  2.14 looks at the size);
* `aten::mkldnn_rnn_layer_backward` returns gradients of weights in other strides than its fake, and
  FP32 gradients of BF16, which the fake of torch 2.12 says are BF16: Inductor's kernels would read
  the bits of one as the other.

Read in torch 2.12, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..torch_inside.graphs import schema
from ..torch_inside.names import below_autograd

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
_FORWARD = torch.ops.aten.mkldnn_rnn_layer.default
_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default


def _rnn_layer(*args: Any) -> Any:
    with below_autograd(), torch.enable_grad():
        *results, workspace = _FORWARD(*args)
        return (*results, workspace[:0])


def _rnn_layer_backward(*args: Any) -> Any:
    *others, workspace = args
    with below_autograd():
        whole = torch.empty(0, dtype=workspace.dtype).set_(workspace.untyped_storage())
        dtype = _dtype_of_gradients(args[0].dtype)
        return tuple(grad.to(dtype).contiguous() for grad in _BACKWARD(*others, whole))


@functools.cache
def _dtype_of_gradients(dtype: torch.dtype) -> torch.dtype:
    """Which one the fake says that the gradients of a layer in this dtype have."""

    def said(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    row, sequence = said(1, 8), said(1, 1, 8)
    layer = [sequence, said(32, 8), said(32, 8), said(32), said(32), row, row]
    results_and_grads = [sequence, row, row] * 2
    rest = [False, 2, 8, 1, True, True, False, [], False, said(0, dtype=torch.uint8)]
    found: torch.dtype = _BACKWARD(*layer, *results_and_grads, *rest)[0].dtype
    return found


def _fake_backward(*args: Any) -> Any:
    return tuple(
        torch.empty_like(grad, memory_format=torch.contiguous_format) for grad in _BACKWARD(*args)
    )


def _define(name: str, torchs: Any, run: Any, fake: Any) -> Any:
    _LIBRARY.define(name + str(schema(torchs)).removeprefix(schema(torchs).name))
    _LIBRARY.impl(name, run, "CPU")
    torch.library.register_fake(f"mpcompile::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.mpcompile, name).default


# torch's operator -> ours
IN_A_GRAPH = {
    _FORWARD: _define("rnn_layer", _FORWARD, _rnn_layer, _FORWARD),
    _BACKWARD: _define("rnn_layer_backward", _BACKWARD, _rnn_layer_backward, _fake_backward),
}
