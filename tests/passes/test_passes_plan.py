"""plan: each FOLLOW node becomes LOW or FULL, in small programs and in blocks of real models."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, leaf
from graphs import Stage, ran, ran_twice
from torch import nn

from mpcompile import ir
from mpcompile.demo import GPT, GPTConfig
from mpcompile.passes.graph.place_casts import place_casts
from mpcompile.passes.graph.plan import plan
from mpcompile.rules.policy import Policy

# -- small programs --------------------------------------------------------------------------------


def test_o3_everything_low() -> None:
    stage = ran_twice(plan, normed_first, leaf(16, 16), leaf(16, 16), level="O3")
    assert ": FULL" not in stage.marks


def into_both(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = F.gelu(F.linear(x, w))
    return F.linear(h, w), h.sum(-1)


def view_with_a_wide_reader(x: torch.Tensor, w: torch.Tensor) -> Any:
    t = x.t()
    return F.linear(t, w), t.sum()


def split(x: torch.Tensor, w: torch.Tensor) -> Any:
    a, b = F.linear(x, w).chunk(2, -1)
    return a @ b.t()


CASES: dict[str, tuple[Any, str, str, str]] = {
    "an activation before a sum: FP32 is free there": (
        lambda x, w: F.gelu(F.linear(x, w)).sum(-1), "gelu", "FULL", "FULL"
    ),
    "an activation between products": (
        lambda x, w: F.linear(F.gelu(F.linear(x, w)), w), "gelu", "LOW", "LOW"
    ),
    "an activation with readers of both kinds": (into_both, "gelu", "LOW", "LOW"),
    "a view that only products read": (
        lambda x, w: F.linear(x.t().contiguous().t(), w), "t", "LOW", "LOW"
    ),
    "a view that a sum reads too": (view_with_a_wide_reader, "t", "FULL", "FULL"),
    "a product with an FP32 number": (
        lambda x, w: F.linear(F.linear(x, w) * w[0, 0], w), "mul", "LOW", "LOW"
    ),
    "a product that sums over several dims": (
        lambda x, w: torch.tensordot(x.view(16, 4, 4), w.view(4, 4, 16), 2), "tensordot", "LOW",
        "LOW",
    ),
    "parts of a low result": (split, "getitem", "LOW", "LOW"),
    "one number": (lambda x, w: F.linear(x, w)[0, 0] * 2, "mul", "FULL", "FULL"),
    "joined with an FP32 tensor": (
        lambda x, w: F.linear(torch.cat([F.linear(x, w), x]), w), "cat", "FULL", "LOW"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@LEVELS
def test_cases(case: str, level: str) -> None:
    program, name, at_o1, at_o2 = CASES[case]
    stage = ran(plan, program, leaf(16, 16), leaf(16, 16), level=level)
    assert stage.mark(name).precision.value == (at_o1 if level == "O1" else at_o2)


def test_what_o2_stores_low_is_cast_down_once_and_up_for_each_reader() -> None:
    """What is looked up and the norm of it: FP32 inside, two bytes for other kernels."""

    def program(table: torch.Tensor, idx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = F.embedding(idx, table)
        h = F.layer_norm(x, (8,))
        p = F.linear(h, w).softmax(-1)
        return F.linear(F.layer_norm(F.linear(p, w) * h * x, (8,)), w)

    inputs = leaf(10, 8), torch.zeros(4, dtype=torch.int64), leaf(8, 8)
    stage = ran_twice(place_casts, program, *inputs, level="O2")
    stage.expect_text("""\
idx: i64[4] = input
table: f32[10, 8] = input
w: f32[8, 8] = input
w_f16: f16[8, 8] = to(w, f16)
embedding: f32[4, 8] = embedding(table, idx)
embedding_f16: f16[4, 8] = to(embedding, f16)
embedding_f16_f32: f32[4, 8] = to(embedding_f16, f32)
layer_norm: f32[4, 8] = layer_norm(embedding_f16_f32, [8])
layer_norm_f16: f16[4, 8] = to(layer_norm, f16)
linear: f16[4, 8] = linear(layer_norm_f16, w_f16)
linear_f32: f32[4, 8] = to(linear, f32)
softmax: f32[4, 8] = softmax(linear_f32, -1)
softmax_f16: f16[4, 8] = to(softmax, f16)
linear_1: f16[4, 8] = linear(softmax_f16, w_f16)
mul: f16[4, 8] = mul(linear_1, layer_norm_f16)
mul_1: f16[4, 8] = mul(mul, embedding_f16)
mul_1_f32: f32[4, 8] = to(mul_1, f32)
layer_norm_1: f32[4, 8] = layer_norm(mul_1_f32, [8])
layer_norm_1_f16: f16[4, 8] = to(layer_norm_1, f16)
linear_2: f16[4, 8] = linear(layer_norm_1_f16, w_f16)
linear_2_f32: f32[4, 8] = to(linear_2, f32)
return linear_2_f32
""")


# -- residual streams ------------------------------------------------------------------------------


norm = functools.partial(F.layer_norm, normalized_shape=(16,))


def branch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, w)), w)


def normed_first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = x + F.dropout(branch(norm(x), w))
    return F.linear(norm(x - branch(norm(x), w)), w)


def normed_after(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = norm(F.linear(x, w))
    x = norm(branch(x, w) + x)
    return F.linear(norm(F.dropout(x) + branch(x, w)), w)


def in_parallel(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(norm(F.linear(norm(x), w) + branch(norm(x), w) + x), w)


def seen_otherwise(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = (x * 2).view(2, 8, 16)
    return F.linear(norm(x + branch(x, w)), w)


def scaled_by_a_weight(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = F.linear(x, w) * w
    return F.linear(norm(x * w[0] + F.linear(norm(x), w)), w)


def of_one_part(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, _ = norm(x).chunk(2)
    return F.linear(norm(a + branch(a, w)), w)


def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, t = norm(x), F.linear(x, w).sigmoid()
    x = t * branch(x, w) + (1 - t) * x
    x = torch.lerp(x, branch(x, w), t)
    return F.linear(norm(torch.addcmul(x, w[0], branch(x, w))), w)


STREAMS = {  # program -> its streams at O2
    normed_first: ["add", "sub"],
    normed_after: ["layer_norm", "layer_norm_1", "dropout", "add", "add_1"],
    in_parallel: ["add_1"],
    seen_otherwise: ["mul", "view", "add"],
    scaled_by_a_weight: ["mul", "mul_1", "add"],
    gated: ["layer_norm", "mul_1", "add", "lerp", "addcmul"],
    of_one_part: ["layer_norm", "chunk", "getitem", "add"],
}


def convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    kernel, mean, var = w.view(16, 16, 1, 1), torch.zeros(16), torch.ones(16)
    x = F.relu(F.conv2d(x.view(4, 16, 2, 2), kernel))
    return x + F.batch_norm(F.conv2d(x, kernel), mean, var, training=True)


def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    p = F.linear(x, w).softmax(-1)
    return F.gelu(p[:, :1] * branch(x, w) + p[:, 1:2] * branch(x, w.t()))


def masked_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    mask = torch.full((8, 16), -9.0).triu(1)
    p = (F.linear(x.view(2, 8, 16), w) - mask).softmax(-1)
    return (F.linear(p, w) + mask).softmax(-1)


OTHERS = {
    "a mask of all layers": masked_twice,
    "a mixture": mixed,
    "a bias": lambda x, w: F.gelu(F.linear(x, w) + w[0]),
    "two products": lambda x, w: F.gelu(F.linear(x, w) + F.linear(x, w.t())),
    "a mask": lambda x, w: (F.linear(x, w) + torch.full((16, 16), -9.0).triu(1)).softmax(-1),
    "a stream that is low at O1 as well": convolved,
    "weights alone": lambda x, w: F.linear(x, norm(w) + F.linear(norm(w), w)),
    "a product of something else": lambda x, w: F.gelu(
        norm(x) + norm(x).amax(-1, keepdim=True) * F.linear(w, w)
    ),
}


@pytest.mark.parametrize("program", STREAMS)
def test_a_residual_stream_is_fp32_at_o2_too(program: Any) -> None:
    """Wherever its norms stand, and beside a product that someone keeps in FP32."""
    weight = nn.Parameter(torch.eye(16))
    for policy in (Policy(), Policy(nodes={"linear_1": "fp32"})):
        marks = decisions(ran(plan, program, leaf(16, 16), weight, level="O2", policy=policy))
        assert {marks[name] for name in STREAMS[program]} <= {"FULL [plan]", "FULL [table]"}


@pytest.mark.parametrize("what", OTHERS)
def test_other_sums_are_none(what: str) -> None:
    def between_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(OTHERS[what](F.linear(x, w), w).view(16, 16), w)

    stage = ran(plan, between_products, leaf(16, 16), nn.Parameter(torch.eye(16)), level="O2")
    assert "residual" not in stage.mark("add").reason


# -- blocks of real models -------------------------------------------------------------------------


def decisions(stage: Stage) -> dict[str, str]:
    """`marks`, with a word on what is stored low although it is computed in FP32."""
    marks = dict(line.split(": ") for line in stage.marks.splitlines())
    return {
        name: f"{mark}, stored low" if ir.is_stored_low(stage.node(name)) else mark
        for name, mark in marks.items()
    }


@pytest.mark.parametrize(("level", "tables"), [("O1", "plan"), ("O2", "guard")])
def test_a_gpt_block(level: str, tables: str) -> None:
    """A layer of the demo's GPT, and a norm. FP32: rotary positions, and the residual stream."""
    block = GPT(GPTConfig(vocab=16, context=8, width=16, layers=1, heads=2)).blocks[0]
    stage = ran_twice(plan, nn.Sequential(block, nn.LayerNorm(16)), leaf(2, 8, 16), level=level)
    expected = f"""\
FULL [table]: layer_norm layer_norm_1 layer_norm_2
LOW [table]: linear scaled_dot_product_attention linear_1 linear_2 linear_3
LOW [plan]: unflatten permute unbind getitem getitem_1 getitem_2 chunk getitem_3 getitem_4
LOW [plan]: chunk_1 getitem_5 getitem_6 transpose flatten gelu
FULL [{tables}]: slice_1 slice_2 mul mul_1 sub mul_2 mul_3 add cat
FULL [{tables}]: slice_3 slice_4 mul_4 mul_5 sub_1 mul_6 mul_7 add_1 cat_1
FULL [plan]: add_2 add_3
"""
    rows = [line.split(": ") for line in expected.splitlines()]
    assert decisions(stage) == {name: mark for mark, names in rows for name in names.split()}
