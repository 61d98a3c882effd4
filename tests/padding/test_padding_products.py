"""Padding is exact for every kind of product, over odd sizes, forward and backward; and through
chains of products, whatever stands between two of them.

By default a few sizes of each program are drawn. Many of them, at O1 and O2:

    pytest -m sweep tests/padding/test_padding_products.py -n 2

takes about 20 minutes on 2 cores.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact import assert_exact
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from module_of import module_of
from torch import Tensor, nn

from mpcompile import ir

SIZES = st.integers(1, 67)
FEW = st.integers(1, 19)
EXAMPLES = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking recompiles for minutes
    suppress_health_check=list(HealthCheck),
)


def drawn(few: int, many: int = 100, **strategies: Any) -> Callable[[Any], Any]:
    """A test of a property: on `few` examples by default, on `many` in the whole run."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def test(examples: int, **given_: Any) -> None:
            def one(**drawn_: Any) -> None:
                check(**drawn_, **given_)

            settings(EXAMPLES, max_examples=examples)(given(**strategies)(one))()

        rest = [p for n, p in inspect.signature(check).parameters.items() if n not in strategies]
        examples = inspect.Parameter("examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([examples, *rest])  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__dict__.update(check.__dict__)
        marks = [pytest.mark.sweep("many random sizes")]
        return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=marks)])(test)

    return decorate


def all_aligned(program: Any, *inputs: Any, **options: Any) -> None:
    """Padding is exact, and leaves no dim of any product unaligned."""
    backend = assert_exact(program, *inputs, **options)
    found = [a for g in backend.graphs for n in g.graph.nodes if (a := ir.alignment(n))]
    assert found, "no product in the graph"
    for alignment in found:
        assert alignment.after == (), alignment.reason
        if alignment.before:
            assert alignment.padded


# -- products --------------------------------------------------------------------------------------


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


# -- chains ----------------------------------------------------------------------------------------


REST = pytest.mark.sweep("the rest of a matrix")

ACTIVATIONS = [
    F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, torch.exp, torch.log,
    torch.rsqrt, torch.reciprocal, torch.sqrt, lambda x: x.square() + 1, lambda x: x**3,
    lambda x: 1 / (1 + x * x), lambda x: x.clamp(0.25, 1), lambda x: x * 0.5 - 3,
    lambda x: x.abs().log1p(), torch.cos, lambda x: F.softmax(x, -1),
    lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x - x.mean(-1, True),
    lambda x: x / x.norm(dim=-1, keepdim=True), lambda x: x * x.sum(0),
    lambda x: torch.maximum(x, -x), lambda x: x.masked_fill(x > 0, 2.0),
    lambda x: torch.where(x > 0, x, 1.0), lambda x: x.flip(-1), lambda x: torch.cat([x, x], 0),
    lambda x: x.cumsum(-1), lambda x: F.dropout(x, 0.0), lambda x: x.detach(),
    lambda x: x.detach() * x,
]  # fmt: skip


# By default one level of each, in turns.
BY_LEVEL = [
    pytest.param(a, level, id=f"{level}-{number}", marks=() if first else REST)
    for number, a in enumerate(ACTIVATIONS)
    for level in ("O1", "O2")
    for first in [(level == "O2") == bool(number % 2)]
]


@pytest.mark.slow_rows("compiles padded models, of many sizes", but=8)
@pytest.mark.parametrize(("activation", "level"), BY_LEVEL)
@drawn(1, 25, b=st.integers(1, 3), i=SIZES, h=SIZES, o=SIZES)
def test_linear_pointwise_linear(
    activation: Any, level: str, b: int, i: int, h: int, o: int
) -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(i, h), nn.Linear(h, o)
    with torch.no_grad():
        up.bias.abs_().add_(3)  # inside the domain of a logarithm

    chain = module_of(lambda m, x: m.down(activation(m.up(x))), up=up, down=down)
    all_aligned(chain, 0.1 * torch.randn(b, 8, i), level=level)


@drawn(2, channels=FEW, hidden=FEW, out=FEW, last=st.booleans())
def test_conv_bias_relu_conv(channels: int, hidden: int, out: int, last: bool) -> None:
    assume(hidden > 1 or not last)  # one channel is in both layouts, its padding in one of them
    net = nn.Sequential(nn.Conv2d(channels, hidden, 3), nn.ReLU(), nn.Conv2d(hidden, out, 3))
    x = torch.randn(2, channels, 7, 7)
    all_aligned(net, x.contiguous(memory_format=torch.channels_last) if last else x)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_residual_adds_of_equally_padded_values(level: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        x = x + F.relu(m.a(x))
        return m.b(x)

    layers = {"embed": nn.Linear(9, 33), "a": nn.Linear(33, 33), "b": nn.Linear(33, 5)}
    all_aligned(module_of(forward, **layers), torch.randn(8, 9), level=level)


def test_every_output_along_a_padded_chain_has_its_own_size() -> None:
    up, down = nn.Linear(8, 13), nn.Linear(13, 7)

    def program(x: Tensor) -> Any:
        h = up(x)
        a = F.gelu(h)
        return h, a, a.t(), a.view(-1), a.view(4, 2, 13), a.unsqueeze(0), a.sum(), down(a)

    all_aligned(program, torch.randn(8, 8))


def test_views_after_a_padded_product() -> None:
    up = nn.Linear(8, 21)

    def program(x: Tensor) -> Any:
        h = up(x)
        return (
            h.view(8, 3, 7), h.view(-1), h.unflatten(1, (7, 3)), h.view(2, 4, 21).flatten(1),
            h.unfold(1, 3, 2), h.t().contiguous().view(3, -1), h.as_strided((4, 2), (21, 1), 3),
            torch.einsum("bi,bi->b", h, h), h[:, 5], h.chunk(3, -1)[1], h.expand(2, 8, 21),
        )  # fmt: skip

    all_aligned(program, torch.randn(8, 8))


@pytest.mark.parametrize("method", ["contiguous", "clone"])
def test_a_layout_after_a_padded_product(method: str) -> None:
    """What lanes hold is found out with single numbers, which have no such layout."""
    up, down = nn.Linear(8, 21), nn.Linear(21, 5)

    def program(x: Tensor) -> Any:
        return down(getattr(up(x), method)(memory_format=torch.channels_last))

    all_aligned(program, torch.randn(2, 3, 4, 8))
