"""narrow_softmax: at O2 a softmax keeps its low result for the backward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, check, leaf
from expecttest import assert_expected_inline
from graphs import Stage
from torch import Tensor

from mpcompile.ir import aten
from mpcompile.passes.graph.narrow_softmax import narrow_softmax


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def qkv() -> tuple[Tensor, ...]:
    return leaf(2, 9, 8), leaf(2, 9, 8), leaf(2, 9, 8)


def test_applies() -> None:
    stage = Stage(narrow_softmax, attention, *qkv(), level="O2")
    stage.run_twice()
    assert_expected_inline(
        stage.text,
        """\
k: f32[2, 9, 8] = input
q: f32[2, 9, 8] = input
v: f32[2, 9, 8] = input
v_f16: f16[2, 9, 8] = to(v, f16)
q_f16: f16[2, 9, 8] = to(q, f16)
k_f16: f16[2, 9, 8] = to(k, f16)
transpose: f16[2, 8, 9] = transpose(k_f16, -1, -2)
matmul: f16[2, 9, 9] = matmul(q_f16, transpose)
matmul_f32: f32[2, 9, 9] = to(matmul, f32)
softmax_low: f16[2, 9, 9] = mpcompile::softmax_low(matmul_f32, -1, f16, False)
matmul_1: f16[2, 9, 8] = matmul(softmax_low, v_f16)
matmul_1_f32: f32[2, 9, 8] = to(matmul_1, f32)
return matmul_1_f32
""",
    )


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: F.linear(x, w).softmax(-1),  # the caller reads the FP32 one
        lambda x, w: (lambda p: (F.linear(p, w), p.log()))(F.linear(x, w).softmax(-1)),
        lambda x, w: F.linear(F.linear(x, w).softmax(-1, dtype=torch.float64).float(), w),
        lambda x, w: F.linear(F.log_softmax(F.linear(x, w), -1), w),
    ],
    ids=["returned", "read twice", "in FP64", "log_softmax"],
)
def test_leaves_others_alone(program: Any) -> None:
    stage = Stage(narrow_softmax, program, leaf(4, 8), leaf(8, 8), level="O2")
    assert not stage.run()


def test_o1_keeps_the_fp32_result() -> None:
    assert not Stage(narrow_softmax, attention, *qkv(), level="O1").run()


@LEVELS
@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers(level: str, emit: str, dtype: torch.dtype) -> None:
    check(attention, *qkv(), level=level, emit=emit, dtype=dtype, low=["matmul"])


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_operator_is_torchs_softmax_rounded(dim: int, safe: bool, dtype: torch.dtype) -> None:
    """Against FP64, the backward from a result that was rounded."""
    x = (3 * torch.randn(5, 6, 7)).requires_grad_()
    if safe:
        with torch.no_grad():
            x[0, :, 0] = x[:, 0, 0] = x[0, 0, :] = float("-inf")
    exact = x.detach().double().requires_grad_()
    softmax = aten._safe_softmax.default if safe else torch.softmax
    wanted = softmax(exact, dim)
    got = torch.ops.mpcompile.softmax_low(x, dim, dtype, safe)
    assert got.dtype is dtype
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=1e-7)
    weights = torch.randn_like(x)
    (got.float() * weights).sum().backward()
    (wanted * weights.double()).sum().backward()
    assert x.grad.dtype is torch.float32
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=0.02, atol=tolerance)


def test_only_the_low_result_is_saved() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.ops.mpcompile.softmax_low(x, -1, torch.float16, False)
    assert [(t.dtype, tuple(t.shape)) for t in saved] == [(torch.float16, (64, 64))]
