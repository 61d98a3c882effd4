"""oneDNN's LSTM layer in a graph: what runs returns what its fake says, on every torch."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpcompile.operators.rnn_layer import IN_A_GRAPH

LSTM = 2  # oneDNN's number
FORWARD = torch.ops.aten.mkldnn_rnn_layer.default
BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default


def layer(dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """The tensors of a layer over 7 steps of 3 x 4, 5 wide, and what else it is told."""
    shapes = [(7, 3, 4), (20, 4), (20, 5), (20,), (20,), (3, 5), (3, 5)]
    torch.manual_seed(0)
    tensors = [torch.randn(*shape).to(dtype) for shape in shapes]
    return tensors, [False, [], LSTM, 5, 1, True, False, True, True]


def run(dtype: torch.dtype) -> tuple[Any, Any]:
    """The results of a layer, without the workspace, and all gradients of their sum."""
    tensors, rest = layer(dtype)
    *results, workspace = IN_A_GRAPH[FORWARD](*tensors, *rest)
    reverse, sizes, mode, hidden, layers, biases, both, first, train = rest
    grads = [torch.ones_like(result) for result in results]
    told = [reverse, mode, hidden, layers, biases, train, both, sizes, first]
    return results, IN_A_GRAPH[BACKWARD](*tensors, *results, *grads, *told, workspace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_are_as_the_fakes_say(dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no BF16 LSTM")
    real = run(dtype)
    with FakeTensorMode():
        fake = run(dtype)
    for ours, said in zip(real, fake, strict=True):
        looks = [[(t.dtype, t.shape, t.stride()) for t in tensors] for tensors in (ours, said)]
        assert looks[0] == looks[1]


def test_gradients_of_bf16_are_those_of_fp64() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no BF16 LSTM")
    (x, *weights, h, c), _ = layer(torch.bfloat16)
    exact = [t.double().requires_grad_() for t in (x, *weights, h, c)]
    lstm = torch.lstm(exact[0], (exact[5][None], exact[6][None]), exact[1:5], True, 1, 0.0, True,
                      False, False)  # fmt: skip
    sum(t.sum() for t in lstm).backward()
    for grad, tensor in zip(run(torch.bfloat16)[1], exact, strict=True):
        wanted = tensor.grad
        assert (grad - wanted).norm() < 2e-2 * wanted.norm()
