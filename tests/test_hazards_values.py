"""Hazards of value and dtype: masks, constants, positions, user casts, other dtypes, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Compared, assert_near, check
from torch import nn

from mpcompile import compiled_plans, mpcompile

LEVELS = pytest.mark.parametrize("level", ["O1", "O2", "O3"])
RULED = pytest.mark.parametrize("level", ["O1", "O2"])  # O3 promises no accuracy
FP16_MAX = 65504.0


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(size, requires_grad=True)


# -- masks -------------------------------------------------------------------------------------------


def mask_with_a_full_row() -> torch.Tensor:
    """True where attention is allowed; nobody may look anywhere from row 2."""
    mask = torch.ones(8, 8).tril().bool()
    mask[2] = False
    return mask


def masked_fill_with_the_minimum(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ k


def masked_fill_in_place(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    scores.masked_fill_(~mask, -1e9)
    return scores.softmax(-1) @ k


def added_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's models write it: a float mask, cast to the scores' dtype."""
    scores = q @ k.transpose(-1, -2) / 4
    bias = (1.0 - mask.to(scores.dtype)) * torch.finfo(scores.dtype).min
    weights = F.softmax(scores + bias, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, 0.0) @ k


def where_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    smallest = torch.tensor(-1e30)
    return torch.where(mask, scores, smallest).softmax(-1) @ k


def baddbmm_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = torch.where(mask, 0.0, torch.finfo(q.dtype).min).expand(2, 8, 8)
    return torch.baddbmm(bias, q, k.transpose(-1, -2), alpha=0.25).softmax(-1) @ k


def sdpa_float_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = torch.where(mask, 0.0, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, k, attn_mask=bias)


def sdpa_minus_billion(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -1e9)
    return F.scaled_dot_product_attention(q, k, k, attn_mask=bias)


def sdpa_bool_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


MASKS = [
    masked_fill_with_the_minimum, masked_fill_in_place, added_mask, where_mask, baddbmm_mask,
    sdpa_float_mask, sdpa_minus_billion, sdpa_bool_mask,
]  # fmt: skip


@RULED
@pytest.mark.parametrize("program", MASKS)
def test_masks(program: Any, level: str) -> None:
    """The row masked as a whole is finite, as in FP32; what it holds means nothing to anybody."""

    def rows(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> Any:
        out = program(q, k, mask)
        return out.masked_fill(~mask.any(-1, keepdim=True), 0.0), out.isfinite().all()

    check(rows, leaf(2, 8, 16), leaf(2, 8, 16), mask_with_a_full_row(), level=level)


@RULED
@pytest.mark.parametrize("floor", [-1e9, torch.finfo(torch.float32).min, float("-inf")])
def test_float_mask_that_comes_from_outside(floor: float, level: str) -> None:
    """Masked keys stay masked: what they hold must not reach the output."""
    mask = torch.ones(8, 8).tril().bool()
    bias = torch.zeros(8, 8).masked_fill(~mask, floor)
    result = check(
        F.scaled_dot_product_attention, leaf(2, 8, 16), leaf(2, 8, 16), leaf(2, 8, 16), bias,
        level=level, low=["scaled_dot_product_attention"],
    )  # fmt: skip
    q, k = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    other = k.clone()
    other[:, -1] = 100.0  # only the last row may look there
    a, b = (result.model(q, keys, keys, bias) for keys in (k, other))
    assert torch.equal(a[:, :-1], b[:, :-1])


@RULED
def test_additive_mask_from_outside_on_scores(level: str) -> None:
    def program(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ k

    bias = torch.zeros(8, 8).masked_fill(~mask_with_a_full_row(), torch.finfo(torch.float32).min)
    check(program, leaf(2, 8, 16), leaf(2, 8, 16), bias, level=level, low=["matmul"])


@RULED
def test_causal_attention(level: str) -> None:
    def program(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    check(
        program, leaf(2, 8, 16), leaf(2, 8, 16), level=level, low=["scaled_dot_product_attention"]
    )


# -- constants and positions --------------------------------------------------------------------------


def tiny_epsilon(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    return h / (h.detach().abs() * 0 + 1e-8) * 1e-8


def epsilon_in_a_square_root(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    zero = h.detach() * 0
    return h * torch.rsqrt(zero + 1e-10) * 1e-5


def clamp_at_epsilon(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    return h / (h.detach() * 0).clamp(min=1e-12) * 1e-12


def large_constant(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    return (h * 1e5 + 3e5) / 1e5


def large_tensor_constant(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    return (h * torch.tensor([1e6])) * torch.tensor([1e-6])


def squares_of_large_numbers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w) * 300
    return (h.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * h


def positions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Rotary embedding at positions FP16 cannot tell apart."""
    steps = torch.arange(4096, 4096 + 8, dtype=torch.float32)
    angle = steps[:, None] * torch.exp(torch.arange(16) * -0.1)
    h = F.linear(x, w)
    return h * angle.cos() + F.linear(h, w) * angle.sin()


def integers_made_float(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(5000, 5008)
    return F.linear(x, w) + (steps.float() % 7)[:, None]


CONSTANTS = [
    tiny_epsilon, epsilon_in_a_square_root, clamp_at_epsilon, large_constant,
    large_tensor_constant, squares_of_large_numbers, positions, integers_made_float,
]  # fmt: skip


@RULED
@pytest.mark.parametrize("program", CONSTANTS)
def test_constants(program: Any, level: str) -> None:
    check(program, leaf(8, 16), leaf(16, 16), level=level, low=["linear"])


@RULED
def test_integer_features(level: str) -> None:
    """Timestamps through `.float()`: 100003 and 100004 are one number in FP16."""

    def program(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(t.float() - 100000.0, w)

    check(program, torch.randint(100000, 100009, (8, 16)), leaf(16, 16), level=level)


@RULED
def test_integer_features_reach_a_product_exactly(level: str) -> None:
    def program(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(t.float(), w) * 1e-5

    weight = torch.tensor([[1.0, -1.0]]).requires_grad_()
    check(program, torch.tensor([[100003, 100002], [70001, 70000]]), weight, level=level)


# -- casts of the user's own ---------------------------------------------------------------------------


@RULED
def test_cast_to_another_values_dtype_is_no_upcast(level: str) -> None:
    """`.to(q.dtype)`, captured as `.to(float32)`, must not widen what follows."""

    def program(q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q = F.linear(q, w)
        weights = F.relu(q).to(q.dtype).type_as(q)
        return F.linear(weights, w)

    assert check(program, leaf(8, 16), leaf(16, 16), level=level).ops("LOW") == [
        "linear", "relu", "linear",
    ]  # fmt: skip


@RULED
def test_explicit_float_is_an_upcast(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        return (h.float() * 3000).relu().float() * 30

    result = check(program, leaf(8, 16), leaf(16, 16), level=level, loss_scale=1.0)
    assert result.ops("LOW") == ["linear"]


@RULED
def test_half_inside_the_program(level: str) -> None:
    """A program that computes a part in FP16 by itself keeps that part as it is."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w).half()
        return F.linear((h * 2).float(), w) + F.linear(h, w.half())

    check(program, leaf(8, 16), leaf(16, 16), level=level, low=["linear"])


@RULED
def test_half_inputs_to_an_fp32_model(level: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    reference = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    reference.load_state_dict(model.state_dict())
    mpcompile(model, dtype=torch.float16, level=level, emit="eager", strict=True)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(8, 16).to(dtype).requires_grad_()
        out = model(x)
        assert_near(out, reference(x.float()), "output", 1e-2)
        (grad,) = torch.autograd.grad(out.mean(), x)
        assert grad.dtype is dtype


# -- other dtypes --------------------------------------------------------------------------------------


@LEVELS
def test_other_dtypes_are_untouched(level: str) -> None:
    def program(
        x: torch.Tensor, w: torch.Tensor, d: torch.Tensor, c: torch.Tensor, i: torch.Tensor
    ) -> Any:
        return (
            F.linear(x, w),
            F.linear(d, d) + 1e-8,
            torch.fft.fft(c) * 2,
            i * 3 + (i > 2).long(),
            (i == 1) | (x[0, :4].detach() > 9),
            x.double().sum() + d.sum(),
        )

    inputs = (
        torch.randn(4, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(4, dtype=torch.complex64, requires_grad=True),
        torch.arange(4),
    )
    result = check(program, leaf(8, 16), leaf(16, 16), *inputs, level=level, low=["linear"])
    assert result.ops("LOW").count("linear") == 1
    exact = program(torch.zeros(1, 4), torch.zeros(1, 4), *inputs)
    for i in (1, 2, 3):
        assert torch.equal(result.model(torch.zeros(1, 4), torch.zeros(1, 4), *inputs)[i], exact[i])


@RULED
def test_bf16(level: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    options = {"dtype": torch.bfloat16, "level": level, "loss_scale": "dynamic"}
    result = check(model, leaf(8, 16), low=["linear"], **options)
    assert not result.plans[0].scaled


# -- autocast regions ------------------------------------------------------------------------------------


def planned(result: Compared, op: str) -> list[str]:
    """The result types of this operator, in program order."""
    return [
        node.planned.partition("[")[0]
        for plan in result.plans
        for node in plan.nodes
        if node.op == f"aten::{op}"
    ]


@RULED
def test_disabled_autocast_keeps_fp32(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        with torch.autocast("cpu", enabled=False):
            h = F.linear(h * 1, w)
        return F.linear(h, w)

    result = check(program, leaf(8, 16), leaf(16, 16), level=level)
    assert planned(result, "linear") == ["f16", "f32", "f16"]


@RULED
def test_bf16_autocast_inside_fp16(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            h = F.linear(h.float(), w)
            with torch.autocast("cpu", enabled=False):
                h = F.linear(h.float(), w)
            h = F.linear(h, w)
        return F.linear(h.float(), w)

    result = check(program, leaf(8, 16), leaf(16, 16), level=level, tolerance=5e-2)
    assert planned(result, "linear") == ["f16", "bf16", "f32", "bf16", "f16"]


@SETTINGS
def test_call_under_an_ambient_autocast(level: str, emit: str) -> None:
    """The whole program in FP16 as asked; autocast outside adds nothing to it."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    reference = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    reference.load_state_dict(model.state_dict())
    mpcompile(model, dtype=torch.float16, level=level, emit=emit, strict=True)
    x = torch.randn(8, 16)
    reference(x).mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    out.float().mean().backward()
    (plan,) = compiled_plans(model)
    assert plan.counts()["LOW"] >= 2
    for a, e in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(a.grad, e.grad, "gradient", 5e-2)
