"""classify: every node gets a class; place_casts: one cast per value and dtype, by its producer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage, ran, ran_twice

from mpcompile import ir
from mpcompile.passes.graph.classify import classify
from mpcompile.passes.graph.place_casts import place_casts
from mpcompile.rules.policy import Policy, Precision

pytestmark = pytest.mark.inside


def test_applies() -> None:
    """Inputs down once, the softmax's input up, its output down, the graph's output up."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, w).softmax(-1), w)

    stage = ran_twice(place_casts, program, leaf(3, 4), leaf(4, 4))
    stage.expect_text("""\
x: f32[3, 4] = input
w: f32[4, 4] = input
w_f16: f16[4, 4] = to(w, f16)
x_f16: f16[3, 4] = to(x, f16)
linear: f16[3, 4] = linear(x_f16, w_f16)
linear_f32: f32[3, 4] = to(linear, f32)
softmax: f32[3, 4] = softmax(linear_f32, -1)
softmax_f16: f16[3, 4] = to(softmax, f16)
linear_1: f16[3, 4] = linear(softmax_f16, w_f16)
linear_1_f32: f32[3, 4] = to(linear_1, f32)
return linear_1_f32
""")


def test_several_readers_share_a_cast() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = F.linear(x, w), F.linear(x, w)
        return a.exp() + a.cos() + b.exp()

    stage = ran(place_casts, program, leaf(3, 4), leaf(4, 4))
    casts = [n.name for n in stage.gm.graph.nodes if ir.is_cast(n)]
    assert sorted(casts) == ["linear_1_f32", "linear_f32", "w_f16", "x_f16"]


def test_leaves_a_graph_of_fp32_alone() -> None:
    def program(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x.exp().sum() + n.double().sum() + torch.fft.fft(x).real.sum()

    stage = Stage(place_casts, program, leaf(4), torch.arange(4))
    assert not stage.run()


def test_cast_stands_where_the_value_was_made() -> None:
    """Not in the no_grad region that reads it first: the gradient would be cut for all readers."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        with torch.no_grad():
            size = h.exp()
        return h.exp() * size

    stage = ran(place_casts, program, leaf(3, 4), leaf(4, 4))
    assert stage.node("linear").next.name == "linear_f32"


def test_mask_is_clamped_by_its_cast() -> None:
    """Half the range, so that a score can be added; -inf stays."""

    def program(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    stage = ran(place_casts, program, leaf(1, 2, 8), torch.zeros(2, 2))
    assert [line for line in stage.text.splitlines() if line.startswith("mask")] == [
        "mask: f32[2, 2] = input",
        "mask_clamped: b8[2, 2] = eq(mask, -inf)",
        "mask_clamped_1: f32[2, 2] = clamp_min(mask, -32752.0)",
        "mask_clamped_2: f32[2, 2] = masked_fill(mask_clamped_1, mask_clamped, -inf)",
        "mask_clamped_2_f16: f16[2, 2] = to(mask_clamped_2, f16)",
    ]


def test_numbers_stay_fp32_beside_low_tensors() -> None:
    """A learned temperature: type promotion gives the tensor's dtype by itself."""

    def program(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, w) * t, w)

    stage = ran(place_casts, program, leaf(3, 4), leaf(4, 4), leaf())
    assert "mul: f16[3, 4] = mul(linear, t)" in stage.text


def test_batch_norm_takes_its_parameters_in_fp32() -> None:
    def program(
        x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor
    ) -> torch.Tensor:
        h = F.conv2d(x, w)
        return F.conv2d(F.batch_norm(h, mean, mean, scale, training=True), w)

    stage = ran(place_casts, program, leaf(2, 4, 5, 5), leaf(4, 4, 1, 1), leaf(4), torch.zeros(4))
    assert "= batch_norm(conv2d, scale, None, mean, mean, True" in stage.text


def test_an_operator_that_refuses_is_left_as_captured() -> None:
    """The user may ask for what an operator's own checks deny."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(F.linear(x, w))

    stage = ran(place_casts, program, leaf(4, 4), leaf(4, 4), policy=Policy(low=["linalg_inv"]))
    assert "linalg_inv: f32[4, 4] = linalg_inv(linear_f32)" in stage.text
    assert stage.mark("linalg_inv").precision is Precision.FULL
    assert stage.mark("linalg_inv").reason.startswith("refuses low operands: ")


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.gelu(F.linear(x, w))
    return (h.softmax(-1) @ w).t() + torch.special.bessel_j0(x.t())


def test_the_table() -> None:
    stage = Stage(classify, program, leaf(8, 16), leaf(16, 16))
    assert not stage.run()  # it only decides
    stage.run_twice()
    stage.expect_marks("""\
linear: LOW [table]
gelu: FOLLOW [table]
softmax: FULL [table]
matmul: LOW [table]
t: FOLLOW [table]
t_1: FOLLOW [table]
special_bessel_j0: KEEP [table]
add: FOLLOW [table]
""")
    assert stage.mark("gelu").reason == "activation that grows no faster than its input"


def other_dtypes(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.linear(x.double(), w.double()), torch.arange(3) + 1, torch.fft.fft(x)


def written(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = x + w
    h[0] = 1
    return h.view(-1)


def opaque(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a @ w, lambda a: a + 1, (x,))


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (other_dtypes, "touches f64"),
        (written, "its memory is written in place"),
        (
            opaque,
            "opaque: its body was captured in these dtypes; 1 matrix product stays FP32 there",
        ),
    ],
)
def test_hands_off(kept: Any, reason: str) -> None:
    policy = Policy(
        low=["linear", "to", "view", "add", "_fft_c2c", "fft_fft", "higher_order::cond"]
    )
    stage = ran(classify, kept, torch.randn(4, 4), torch.randn(4, 4), policy=policy)
    marks = {name: stage.mark(name) for name in stage.marks.replace(":", "").split()[::3]}
    assert reason in {mark.reason for mark in marks.values()}
    low = {name for name, mark in marks.items() if mark.precision is Precision.LOW}
    assert low == set()
