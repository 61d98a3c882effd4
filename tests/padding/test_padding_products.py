"""Padding is exact for every kind of product, over odd sizes, forward and backward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact import assert_exact
from hypothesis import strategies as st
from padding_checks import FEW, SIZES, all_aligned, drawn
from torch import Tensor, nn

from mpcompile import ir


@drawn(4, m=SIZES, n=SIZES, k=SIZES, bias=st.booleans())
def test_linear(m: int, n: int, k: int, bias: bool) -> None:
    all_aligned(nn.Linear(k, n, bias), torch.randn(m, k))


@drawn(3, b=FEW, m=FEW, n=SIZES, k=SIZES)
def test_linear_over_batches(b: int, m: int, n: int, k: int) -> None:
    all_aligned(nn.Linear(k, n), torch.randn(b, m, k))


@drawn(3, m=SIZES, n=SIZES, k=SIZES)
def test_mm_and_addmm(m: int, n: int, k: int) -> None:
    def program(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
        return a.mm(b), torch.addmm(c, a, b, beta=0.5, alpha=2.0), torch.addmm(d, a, b)

    all_aligned(program, torch.randn(m, k), torch.randn(k, n), torch.randn(n), torch.randn(m, 1))


@drawn(3, b=FEW, m=SIZES, n=SIZES, k=SIZES)
def test_bmm_baddbmm_and_addbmm(b: int, m: int, n: int, k: int) -> None:
    def program(x: Tensor, y: Tensor, c: Tensor) -> Any:
        return x.bmm(y), torch.baddbmm(c, x, y), torch.addbmm(c[0], x, y)

    all_aligned(program, torch.randn(b, m, k), torch.randn(b, k, n), torch.randn(1, m, n))


@pytest.mark.parametrize("ranks", ["2x3", "3x2", "4x3", "1x4"])
@drawn(1, 25, b=FEW, m=SIZES, n=SIZES, k=SIZES)
def test_matmul(b: int, m: int, n: int, k: int, ranks: str) -> None:
    left, right = {
        "2x3": ((m, k), (b, k, n)), "3x2": ((b, m, k), (k, n)),
        "4x3": ((2, b, m, k), (b, k, n)), "1x4": ((1, m, k), (2, b, k, n)),
    }[ranks]  # fmt: skip
    all_aligned(torch.matmul, torch.randn(left), torch.randn(right))


@pytest.mark.parametrize(
    "equation",
    ["bik,bkj->bij", "ik,jk->ij", "bhid,bhjd->bhij", "bik,jk->bij", "kbi,bkj->jbi", "ibk,kbj->ij"],
)
@drawn(1, 25, b=FEW, i=FEW, j=FEW, k=FEW)
def test_einsum(b: int, i: int, j: int, k: int, equation: str) -> None:
    sizes = {"b": b, "i": i, "j": j, "k": k, "h": 2, "d": k}
    left, right = equation.split("->")[0].split(",")
    operands = [torch.randn([sizes[x] for x in term]) for term in (left, right)]
    all_aligned(lambda x, y: torch.einsum(equation, x, y), *operands)


@pytest.mark.parametrize(
    "equation", ["ij,ij->i", "ii,ij->j", "bi...,ij->bj...", "ij,k->ijk", "i,j"]
)
def test_an_einsum_that_is_no_product_is_left_alone(equation: str) -> None:
    left, right = equation.split("->")[0].split(",")
    operands = [torch.randn([5] * (len(t.replace("...", "")) + (".." in t))) for t in (left, right)]
    backend = assert_exact(lambda x, y: torch.einsum(equation, x, y), *operands)
    assert "constant_pad_nd" not in backend.ops()


CONVOLUTIONS = [
    (nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3),
    (nn.ConvTranspose1d, 1), (nn.ConvTranspose2d, 2), (nn.ConvTranspose3d, 3),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "rank"), CONVOLUTIONS)
@drawn(2, channels=FEW, out=FEW, batch=st.integers(1, 3), bias=st.booleans(), last=st.booleans())
def test_convolutions(
    kind: Any, rank: int, channels: int, out: int, batch: int, bias: bool, last: bool
) -> None:
    x = torch.randn(batch, channels, *[5, 4, 3][:rank])
    if last and rank == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    all_aligned(kind(channels, out, 2, stride=2, padding=1, bias=bias), x)


def test_a_convolution_without_a_batch() -> None:
    all_aligned(nn.Conv2d(3, 5, 3), torch.randn(3, 7, 7))


def test_conv_tbc() -> None:
    all_aligned(torch.conv_tbc, torch.randn(7, 2, 3), torch.randn(2, 3, 5), torch.randn(5))


def test_a_grouped_convolution_says_why_not() -> None:
    backend = assert_exact(nn.Conv2d(6, 9, 3, groups=3), torch.randn(2, 6, 7, 7))
    (found,) = [a for n in backend.graphs[0].graph.nodes if (a := ir.alignment(n))]
    assert found.after == ("in_channels", "out_channels")
    assert "each group is a product alone" in found.reason


@pytest.mark.slow("compiles padded models, of many sizes")
@drawn(4, t=FEW, s=FEW, e=SIZES, v=SIZES, causal=st.booleans(), scale=st.booleans())
def test_attention(t: int, s: int, e: int, v: int, causal: bool, scale: bool) -> None:
    def program(q: Tensor, k: Tensor, value: Tensor) -> Tensor:
        given = 0.3 if scale else None
        return F.scaled_dot_product_attention(q, k, value, is_causal=causal, scale=given)

    all_aligned(program, torch.randn(2, 3, t, e), torch.randn(2, 3, s, e), torch.randn(2, 3, s, v))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@drawn(1, 50, width=SIZES, layers=st.integers(1, 2), both=st.booleans(), bias=st.booleans())
def test_the_input_of_recurrent_layers(
    kind: Any, width: int, layers: int, both: bool, bias: bool
) -> None:
    layer = kind(width, 8, layers, bidirectional=both, bias=bias)
    with torch._dynamo.config.patch(allow_rnn=True):
        all_aligned(lambda x: layer(x)[0], torch.randn(4, 2, width))
