"""plan: each FOLLOW node becomes LOW or FULL, in small programs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, leaf
from expecttest import assert_expected_inline
from graphs import Stage
from torch import nn

from mpcompile.passes.graph.place_casts import place_casts
from mpcompile.passes.graph.plan import plan
from mpcompile.rules.policy import Policy


class Block(nn.Module):
    """A residual branch with a norm, as transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(F.gelu(self.up(self.norm(x))).view(-1, 12))
        return (x + h.view(x.shape)).mean(-1)


@LEVELS
def test_the_residual_stream_is_added_in_fp32(level: str) -> None:
    stage = Stage(plan, Block(), leaf(2, 3, 8), level=level)
    stage.run_twice()
    assert_expected_inline(
        stage.marks,
        """\
layer_norm: FULL [table]
linear: LOW [table]
gelu: LOW [plan]
view: LOW [plan]
linear_1: LOW [table]
view_1: LOW [plan]
add: FULL [plan]
mean: FULL [table]
""",
    )
    if level == "O1":
        assert stage.mark("add").reason.endswith("the widest operand wins: x is FP32")


def test_o3_everything_low() -> None:
    stage = Stage(plan, Block(), leaf(2, 3, 8), level="O3")
    stage.run_twice()
    assert ": FULL" not in stage.marks


def into_a_reduction(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.gelu(F.linear(x, w)).sum(-1)


def into_a_product(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.linear(F.gelu(F.linear(x, w)), w)


def into_both(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = F.gelu(F.linear(x, w))
    return F.linear(h, w), h.sum(-1)


def view_of_an_input(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.linear(x.t().contiguous().t(), w)


def view_with_a_wide_reader(x: torch.Tensor, w: torch.Tensor) -> Any:
    t = x.t()
    return F.linear(t, w), t.sum()


def scaled_by_a_number(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.linear(F.linear(x, w) * w[0, 0], w)


def split(x: torch.Tensor, w: torch.Tensor) -> Any:
    a, b = F.linear(x, w).chunk(2, -1)
    return a @ b.t()


def joined_with_fp32(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.linear(torch.cat([F.linear(x, w), x]), w)


CASES = {
    "an activation before a sum: FP32 is free there": (into_a_reduction, "gelu", "FULL", "FULL"),
    "an activation between products": (into_a_product, "gelu", "LOW", "LOW"),
    "an activation with readers of both kinds": (into_both, "gelu", "LOW", "LOW"),
    "a view that only products read": (view_of_an_input, "t", "LOW", "LOW"),
    "a view that a sum reads too": (view_with_a_wide_reader, "t", "FULL", "FULL"),
    "a product with an FP32 number": (scaled_by_a_number, "mul", "LOW", "LOW"),
    "parts of a low result": (split, "getitem", "LOW", "LOW"),
    "joined with an FP32 tensor": (joined_with_fp32, "cat", "FULL", "LOW"),
}


@pytest.mark.parametrize("case", CASES)
@LEVELS
def test_cases(case: str, level: str) -> None:
    program, name, at_o1, at_o2 = CASES[case]
    stage = Stage(plan, program, leaf(16, 16), leaf(16, 16), level=level)
    stage.run()
    assert stage.mark(name).precision.value == (at_o1 if level == "O1" else at_o2)


def test_policy_and_guards_are_left_alone() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.relu(F.gelu(F.linear(x, w))) + 1e-9, w)

    for level in ("O1", "O2"):
        options = {"level": level, "policy": Policy(full=["gelu"]), "dynamic": True}
        stage = Stage(plan, program, leaf(4, 4), leaf(4, 4), **options)
        stage.run()
        assert stage.mark("gelu").rule == "policy"
        assert stage.mark("add").rule == "guard"
        assert stage.mark("linear_1").precision.value == "LOW"


def test_one_number_is_fp32_at_every_level_with_rules() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w)[0, 0] * 2

    for level in ("O1", "O2"):
        stage = Stage(plan, program, leaf(4, 4), leaf(4, 4), level=level)
        stage.run()
        assert stage.mark("mul").precision.value == "FULL"


def test_what_o2_stores_low_is_cast_down_once_and_up_for_each_reader() -> None:
    """What is looked up and the norm of it: FP32 inside, two bytes for other kernels."""

    def program(table: torch.Tensor, idx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = F.embedding(idx, table)
        h = F.layer_norm(x, (8,))
        p = F.linear(h, w).softmax(-1)
        return F.linear(F.layer_norm(F.linear(p, w) + h + x, (8,)), w)

    inputs = leaf(10, 8), torch.zeros(4, dtype=torch.int64), leaf(8, 8)
    stage = Stage(place_casts, program, *inputs, level="O2")
    stage.run_twice()
    assert_expected_inline(
        stage.text,
        """\
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
add: f16[4, 8] = add(linear_1, layer_norm_f16)
add_1: f16[4, 8] = add(add, embedding_f16)
add_1_f32: f32[4, 8] = to(add_1, f32)
layer_norm_1: f32[4, 8] = layer_norm(add_1_f32, [8])
layer_norm_1_f16: f16[4, 8] = to(layer_norm_1, f16)
linear_2: f16[4, 8] = linear(layer_norm_1_f16, w_f16)
linear_2_f32: f32[4, 8] = to(linear_2, f32)
return linear_2_f32
""",
    )
