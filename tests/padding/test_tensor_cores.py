"""The Tensor Core report, and the view of products that it counts with."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from graphs import captured
from torch import Tensor, nn

from benchmarks.models import Recommender, resnet18
from mpcompile import Policy, compiled_plans, ir, mpcompile
from mpcompile.demo.gpt import GPT, GPTConfig
from mpcompile.ir.shapes import Product
from mpcompile.padding.products import product
from mpcompile.planner.tensor_core_report import TensorCoreReport


def report(model: nn.Module, *inputs: Tensor, **options: Any) -> TensorCoreReport:
    options = {"pad": "always", "dtype": torch.float16, "loss_scale": 16.0, **options}
    fast = mpcompile(model, emit="eager", strict=True, **options)
    fast(*inputs).mean().backward()
    (plan,) = compiled_plans(fast)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    return plan.tensor_cores


def tokens(*size: int) -> Tensor:
    return torch.randint(256, size)


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.slow("compiles padded models, of many sizes")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_product_of_the_demo_is_aligned(level: str) -> None:
    model = GPT(GPTConfig())
    found = report(model, tokens(1, 128), tokens(1, 128), level=level)
    assert found.share == found.share_before == 1
    assert len(found.ops) == 4 * 5 + 1
    assert found.advice == ()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_product_of_a_recommender_is_aligned(level: str) -> None:
    found = report(Recommender(), torch.randn(16, 13), torch.randint(2, (16,)), level=level)
    assert all(op.eligible for op in found.ops)
    assert found.share == 1
    assert_expected_inline(
        str(found),
        """\
Tensor Cores: 25.6% of 18.4 MFLOP eligible as captured, 100.0% as compiled
yes  213.0 kFLOP  linear (bottom.0): batch 1, m 16, n 512, k 13 -> 16; padded
yes    4.2 MFLOP  linear_1 (bottom.2): batch 1, m 16, n 256, k 512; aligned as it is
yes  524.3 kFLOP  linear_2 (bottom.4): batch 1, m 16, n 64, k 256; aligned as it is
yes    1.5 MFLOP  bmm: batch 16, m 27 -> 32, n 27 -> 32, k 64; padded
yes    6.4 MFLOP  linear_3 (top.0): batch 1, m 16, n 479 -> 480, k 415 -> 416; padded
yes    5.6 MFLOP  linear_4 (top.2): batch 1, m 16, n 367 -> 368, k 479 -> 480; padded
yes   11.7 kFLOP  linear_5 (top.4): batch 1, m 16, n 1 -> 8, k 367 -> 368; padded
415 -> 416 (k of top.0) would save one pad
27 -> 32 (n of bmm) would save 2 slices and 2 pads""",
    )


def test_every_product_of_a_resnet_is_aligned() -> None:
    found = report(resnet18(width=8, depth=1), torch.randn(2, 3, 32, 32), tokens(2))
    stem, *rest = found.ops
    assert (stem.before["in_channels"], stem.after["in_channels"]) == (3, 8)
    assert all(op.eligible for op in found.ops)
    assert all(op.before == op.after for op in rest[:-1])
    assert found.share == 1
    assert found.share_before < 0.6


# -- the report ------------------------------------------------------------------------------------


def tiny() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 21)), torch.randn(8, 13)


def test_shares_are_of_flops() -> None:
    model, x = tiny()
    found = report(model, x)
    first, second = found.ops
    assert (first.flops, second.flops) == (2 * 8 * 13 * 16, 2 * 8 * 16 * 21)
    assert found.share_before == 0
    kept = report(*tiny(), pad="never")
    assert kept.share == 0
    assert [op.reason for op in kept.ops] == ["pad='never'"] * 2


def test_what_runs_in_fp32_is_not_eligible() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 48))
    found = report(model, torch.randn(8, 16), policy=Policy(modules={"^1$": "fp32"}))
    assert [op.eligible for op in found.ops] == [True, False]
    assert found.share == found.share_before == 0.25
    assert found.ops[1].reason.startswith("runs in FP32: ")
    assert found.advice == ()


def test_a_graph_without_products() -> None:
    found = TensorCoreReport()
    assert (found.share_before, found.share) == (1, 1)
    assert str(found) == "Tensor Cores: no matrix product here"


def test_advice_names_the_size_where_it_is_set_and_what_it_costs() -> None:
    model, x = nn.Sequential(nn.Linear(16, 21), nn.Softmax(-1), nn.Linear(21, 16)), randn(8, 16)
    assert report(model, x).advice == (
        "21 -> 24 (n of 0, k of 2) would save one slice and one pad",
    )
    (left,) = report(model, x, pad="never").advice
    assert left == "21 -> 24 (n of 0, k of 2) would align 10.8 kFLOP"


def test_no_advice_to_change_the_data_or_the_classes() -> None:
    assert report(*tiny()).advice == ()


def test_a_vocabulary_may_have_tokens_that_nobody_uses() -> None:
    model = nn.Sequential(nn.Embedding(21, 16), nn.Linear(16, 21))
    assert report(model, tokens(8) % 21).advice == ("21 -> 24 (n of 1) would save one slice",)


def test_a_symbolic_size_is_text_and_counts_as_it_was_traced() -> None:
    model, _ = tiny()
    x = torch.randn(24, 13)
    torch._dynamo.mark_dynamic(x, 0)
    first, _second = report(model, x).ops
    assert first.flops == 2 * 24 * 13 * 16
    assert isinstance(first.before["m"], str)
    assert first.after["m"] != first.before["m"]


# -- the view of products --------------------------------------------------------------------------


def only(program: Any, *inputs: Tensor, **options: Any) -> Product:
    found = [p for n in captured(program, *inputs, **options).graph.nodes if (p := product(n))]
    (one,) = found
    return one


def randn(*size: int) -> Tensor:
    return torch.randn(size)


GEMMS: dict[str, tuple[Any, tuple[Tensor, ...], tuple[int, ...]]] = {
    # batch, m, n, k
    "linear": (F.linear, (randn(2, 3, 5), randn(7, 5), randn(7)), (1, 6, 7, 5)),
    "mm": (torch.mm, (randn(3, 5), randn(5, 7)), (1, 3, 7, 5)),
    "addmm": (torch.addmm, (randn(7), randn(3, 5), randn(5, 7)), (1, 3, 7, 5)),
    "bmm": (torch.bmm, (randn(2, 3, 5), randn(2, 5, 7)), (2, 3, 7, 5)),
    "baddbmm": (torch.baddbmm, (randn(3, 1), randn(2, 3, 5), randn(2, 5, 7)), (2, 3, 7, 5)),
    "addbmm": (torch.addbmm, (randn(3, 7), randn(2, 3, 5), randn(2, 5, 7)), (1, 3, 7, 10)),
    "matmul": (torch.matmul, (randn(4, 1, 3, 5), randn(2, 5, 7)), (8, 3, 7, 5)),
    "einsum": (
        lambda a, b: torch.einsum("bthd,bshd->bhts", a, b), (randn(2, 3, 4, 5), randn(2, 7, 4, 5)),
        (8, 3, 7, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GEMMS)
def test_dims_of_matrix_products(name: str) -> None:
    program, inputs, dims = GEMMS[name]
    found = only(program, *inputs)
    named = dict(zip(("batch", "m", "n", "k"), dims, strict=True))
    assert (found.kind, found.measured()) == ("gemm", named)
    assert found.flops() == 2 * math.prod(dims)
    assert found.strides == ("n", "k")
    assert found.rows == ("m",)


def test_what_is_added_carries_the_labels_that_it_has() -> None:
    labels = only(torch.baddbmm, randn(3, 1), randn(2, 3, 5), randn(2, 5, 7)).operands
    assert labels[0,] == ("m", None)
    assert only(F.linear, randn(2, 5), randn(7, 5), randn(7)).operands[2,] == ("n",)


CONVOLUTIONS: dict[str, tuple[nn.Module, Tensor, tuple[int, ...]]] = {
    # batch, positions, channels in and out, kernel, groups
    "1d": (nn.Conv1d(3, 5, 2), randn(2, 3, 9), (2, 8, 3, 5, 2, 1)),
    "2d": (
        nn.Conv2d(3, 5, (2, 3), stride=2, padding=1), randn(2, 3, 9, 7), (2, 20, 3, 5, 6, 1),
    ),
    "3d": (nn.Conv3d(3, 5, 2), randn(2, 3, 4, 3, 3), (2, 12, 3, 5, 8, 1)),
    "no batch": (nn.Conv2d(3, 5, 3), randn(3, 9, 7), (1, 35, 3, 5, 9, 1)),
    "groups": (nn.Conv2d(6, 9, 3, groups=3), randn(2, 6, 5, 5), (2, 9, 2, 3, 9, 3)),
    "transposed": (nn.ConvTranspose2d(3, 5, 2, stride=2), randn(2, 3, 4, 4), (2, 16, 3, 5, 4, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_dims_of_convolutions(name: str) -> None:
    layer, x, dims = CONVOLUTIONS[name]
    found = only(layer, x)
    assert found.kind == "conv"
    assert tuple(found.measured().values()) == dims
    assert found.flops() == 2 * math.prod(dims)
    assert found.strides == ("in_channels", "out_channels")
    assert found.rows == ()
    assert bool(found.fixed) == (name == "groups")


def test_dims_of_attention() -> None:
    found = only(
        F.scaled_dot_product_attention, randn(2, 3, 5, 20), randn(2, 3, 7, 20), randn(2, 3, 7, 9)
    )
    assert found.measured() == {"batch": 6, "queries": 5, "keys": 7, "head": 20, "value_head": 9}
    assert found.flops() == 2 * 6 * 5 * 7 * (20 + 9)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("directions", [1, 2])
def test_dims_of_recurrent_layers(kind: Any, gates: int, directions: int) -> None:
    layer = kind(13, 16, num_layers=2, bidirectional=directions == 2)
    with torch._dynamo.config.patch(allow_rnn=True):
        found = only(lambda x: layer(x)[0], randn(5, 3, 13))
    dims = found.measured()
    assert {dims[x] for x in ("input", "hidden", "gates", "steps")} == {13, 16, gates, 15}
    first, second = 13 + 16, 16 * directions + 16
    assert found.flops() == 2 * 15 * directions * gates * 16 * (first + second)
    assert found.fixed.keys() == {"hidden"}


@pytest.mark.parametrize(
    ("program", "inputs"),
    [
        (torch.mv, (randn(3, 5), randn(5))),
        (torch.dot, (randn(5), randn(5))),
        (torch.matmul, (randn(5), randn(5, 7))),
        (torch.mul, (randn(5), randn(5))),
        (lambda a, b: torch.einsum("ij,ij->i", a, b), (randn(3, 5), randn(3, 5))),
    ],
)
def test_what_is_bound_by_memory_is_no_product(program: Any, inputs: tuple[Tensor, ...]) -> None:
    assert not [n for n in captured(program, *inputs).graph.nodes if product(n)]


def test_only_operators_are_products() -> None:
    graph = captured(F.linear, randn(2, 3), randn(5, 3)).graph
    assert [ir.op_name(n) for n in graph.nodes if product(n)] == ["aten::linear"]
